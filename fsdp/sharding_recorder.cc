#include "brigade/fsdp/sharding_recorder.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace brigade {

struct ShardingRecorder::Arrival {
  // The first time counts: who has waited may be told before callbacks are.
  void stamp_complete() {
    int64_t none = 0;
    complete_ns.compare_exchange_strong(none, now_ns());
  }

  std::atomic<int64_t> complete_ns = 0;
  DeviceTimes device_times;  // of one launch
};

void ShardingRecorder::set_sample_rate(int64_t sample_rate) {
  TORCH_CHECK_VALUE(sample_rate >= 0,
                    "timeline: expected a sample rate >= 0, found ",
                    sample_rate, ".\nGive 0 for none.");
  sample_rate_ = sample_rate;
}

void ShardingRecorder::stamp(int64_t& time_ns) const {
  if (is_sampling_) time_ns = now_ns();
}

void ShardingRecorder::forward_begins() {
  pass_ = GatheredIn::kForward;
  if (std::exchange(is_in_step_, true)) return;
  is_sampling_ = TimelineRecorder::is_sampled(num_steps_ + 1, sample_rate_);
  if (!is_sampling_) return;
  current_ = {.times = {.iteration = num_steps_ + 1}};
  stamp(current_.times.forward_begin_ns);
}

void ShardingRecorder::backward_begins() {
  pass_ = GatheredIn::kBackward;
  stamp(current_.times.backward_begin_ns);
}

void ShardingRecorder::step_ends() {
  stamp(current_.times.finalize_end_ns);
  ++num_steps_;
  is_in_step_ = false;
  pass_ = GatheredIn::kOther;
  if (std::exchange(is_sampling_, false)) last_ = std::exchange(current_, {});
}

void ShardingRecorder::begins(Collective collective, size_t unit) {
  if (!is_sampling_) return;
  current_.launches[collective].push_back(
      {.unit = unit, .times = {.pass = pass_, .launch_ns = now_ns()}});
}

void ShardingRecorder::launched(Collective collective,
                                c10::ivalue::Future& future) {
  if (!is_sampling_) return;
  const auto arrival = std::make_shared<Arrival>();
  arrival->device_times.record(0, DeviceTimes::kLaunch, device_);
  current_.launches[collective].back().arrivals.push_back(arrival);
  // A callback that uses the future runs on streams that wait for its value.
  future.addCallback(
      [arrival, device = device_](c10::ivalue::Future&) {
        arrival->stamp_complete();
        arrival->device_times.record(0, DeviceTimes::kComplete, device);
      },
      /*uses_future=*/!device_.is_cpu());
}

ShardingRecorder::Launch* ShardingRecorder::last_gather_of(size_t unit) {
  if (!is_sampling_) return nullptr;
  auto& gathers = current_.launches[kGather];
  const auto found =
      std::ranges::find(gathers.rbegin(), gathers.rend(), unit, &Launch::unit);
  return found == gathers.rend() ? nullptr : &*found;
}

void ShardingRecorder::needed(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather == nullptr || gather->times.needed_ns != 0) return;
  gather->times.needed_ns = now_ns();
}

void ShardingRecorder::unsharded(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather == nullptr || gather->times.unsharded_ns != 0) return;
  if (device_.is_cpu()) {
    for (const auto& arrival : gather->arrivals) arrival->stamp_complete();
  }
  gather->times.unsharded_ns = now_ns();
}

// Complete when all of it was.
GatherTimes ShardingRecorder::times_of(const Launch& launch) const {
  GatherTimes times = launch.times;
  for (size_t i = 0; i < launch.arrivals.size(); ++i) {
    Timeline of_device = {.units = std::vector<UnitTimes>(1)};
    UnitTimes& arrival = of_device.units.front();
    arrival.complete_ns = launch.arrivals[i]->complete_ns;
    if (!device_.is_cpu()) launch.arrivals[i]->device_times.resolve(of_device);
    if (i == 0 && arrival.launch_ns != 0) times.launch_ns = arrival.launch_ns;
    times.complete_ns = std::max(times.complete_ns, arrival.complete_ns);
  }
  return times;
}

ShardingTimeline ShardingRecorder::timeline(
    const std::vector<std::string>& names) const {
  ShardingTimeline timeline = last_.times;
  for (const Launch& launch : last_.launches[kGather]) {
    timeline.gathers.push_back(times_of(launch));
    timeline.gathers.back().unit = names[launch.unit];
  }
  for (const Launch& launch : last_.launches[kReduction]) {
    const GatherTimes times = times_of(launch);
    timeline.reductions.push_back({.unit = names[launch.unit],
                                   .launch_ns = times.launch_ns,
                                   .complete_ns = times.complete_ns});
  }
  return timeline;
}

}  // namespace brigade
