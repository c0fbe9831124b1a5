#include "brigade/fsdp/sharding_recorder.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "brigade/observing/timeline.h"
#include "brigade/observing/timeline_recorder.h"

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

void ShardingRecorder::stamp(int64_t& time_ns) { time_ns = now_ns(); }

void ShardingRecorder::forward_begins() {
  pass_ = GatheredIn::kForward;
  if (std::exchange(is_in_step_, true)) return;
  is_sampling_ = TimelineRecorder::is_sampled(num_steps_ + 1, sample_rate_);
  if (!is_sampling_) return;
  current_ = {.iteration = num_steps_ + 1};
  gathers_.clear();
  reductions_.clear();
  stamp(current_.forward_begin_ns);
}

void ShardingRecorder::backward_begins() {
  pass_ = GatheredIn::kBackward;
  if (is_sampling_) stamp(current_.backward_begin_ns);
}

void ShardingRecorder::step_ends() {
  ++num_steps_;
  is_in_step_ = false;
  pass_ = GatheredIn::kOther;
  if (!std::exchange(is_sampling_, false)) return;
  stamp(current_.finalize_end_ns);
  last_ = std::exchange(current_, {});
  last_gathers_ = std::exchange(gathers_, {});
  last_reductions_ = std::exchange(reductions_, {});
}

void ShardingRecorder::step_fails() {
  is_in_step_ = false;
  is_sampling_ = false;
}

void ShardingRecorder::add(std::vector<Launch>& launches, size_t unit) {
  launches.push_back({.unit = unit, .pass = pass_, .launch_ns = now_ns()});
}

void ShardingRecorder::watch(Launch& launch, c10::ivalue::Future& future) {
  const auto arrival = std::make_shared<Arrival>();
  if (!device_.is_cpu()) {
    arrival->device_times.restart(1);
    arrival->device_times.record(0, DeviceTimes::kLaunch, device_);
  }
  launch.arrivals.push_back(arrival);
  // A callback that uses the future runs on streams that wait for its value.
  future.addCallback(
      [arrival, device = device_](c10::ivalue::Future&) {
        arrival->stamp_complete();
        arrival->device_times.record(0, DeviceTimes::kComplete, device);
      },
      /*uses_future=*/!device_.is_cpu());
}

ShardingRecorder::Launch* ShardingRecorder::last_gather_of(size_t unit) {
  const auto found =
      std::find_if(gathers_.rbegin(), gathers_.rend(),
                   [&](const Launch& launch) { return launch.unit == unit; });
  return found == gathers_.rend() ? nullptr : &*found;
}

void ShardingRecorder::stamp_needed(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather != nullptr && gather->needed_ns == 0) stamp(gather->needed_ns);
}

void ShardingRecorder::stamp_unsharded(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather == nullptr || gather->whole_ns != 0) return;
  if (device_.is_cpu()) {
    for (const auto& arrival : gather->arrivals) arrival->stamp_complete();
  }
  stamp(gather->whole_ns);
}

// Returns when all of it was complete.
int64_t ShardingRecorder::resolve(const Launch& launch,
                                  int64_t& launch_ns) const {
  launch_ns = launch.launch_ns;
  int64_t complete_ns = 0;
  for (size_t i = 0; i < launch.arrivals.size(); ++i) {
    Timeline of_device = {.units = std::vector<UnitTimes>(1)};
    UnitTimes& times = of_device.units.front();
    times.complete_ns = launch.arrivals[i]->complete_ns;
    if (!device_.is_cpu()) launch.arrivals[i]->device_times.resolve(of_device);
    if (i == 0 && times.launch_ns != 0) launch_ns = times.launch_ns;
    complete_ns = std::max(complete_ns, times.complete_ns);
  }
  return complete_ns;
}

ShardingTimeline ShardingRecorder::timeline(
    const std::vector<std::string>& names) const {
  ShardingTimeline timeline = last_;
  for (const Launch& launch : last_gathers_) {
    GatherTimes& times =
        timeline.gathers.emplace_back(GatherTimes{.unit = names[launch.unit],
                                                  .pass = launch.pass,
                                                  .needed_ns = launch.needed_ns,
                                                  .whole_ns = launch.whole_ns});
    times.complete_ns = resolve(launch, times.launch_ns);
  }
  for (const Launch& launch : last_reductions_) {
    ReductionTimes& times = timeline.reductions.emplace_back(
        ReductionTimes{.unit = names[launch.unit]});
    times.complete_ns = resolve(launch, times.launch_ns);
  }
  return timeline;
}

}  // namespace brigade
