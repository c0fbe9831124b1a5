#include "brigade/fsdp/sharding_timeline.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "brigade/observing/timeline_recorder.h"
#include "brigade/observing/timeline.h"

namespace brigade {
namespace {

// 0 if one of them did not happen.
int64_t between_ns(int64_t begin_ns, int64_t end_ns) {
  if (begin_ns == 0 || end_ns == 0) return 0;
  return std::max<int64_t>(end_ns - begin_ns, 0);
}

double in_ms(int64_t ns) { return static_cast<double>(ns) / 1e6; }

// By GatheredIn.
constexpr std::string_view kGathers[] = {"gather forward", "gather backward",
                                         "gather"};

}  // namespace

int64_t GatherTimes::travel_ns() const {
  return between_ns(launch_ns, complete_ns);
}

int64_t GatherTimes::exposed_ns() const {
  if (needed_ns == 0) return 0;
  return between_ns(std::max(launch_ns, needed_ns),
                    std::min(complete_ns, whole_ns));
}

int64_t ReductionTimes::travel_ns() const {
  return between_ns(launch_ns, complete_ns);
}

int64_t ShardingTimeline::exposed_ns(size_t reduction) const {
  const ReductionTimes& asked = reductions.at(reduction);
  int64_t covered_until_ns = backward_end_ns;
  for (size_t i = 0; i < reduction; ++i) {
    covered_until_ns = std::max(covered_until_ns, reductions[i].complete_ns);
  }
  return between_ns(std::max(covered_until_ns, asked.launch_ns),
                    asked.complete_ns);
}

std::string describe(const ShardingTimeline& timeline) {
  if (timeline.iteration == 0) return "no iteration has been sampled\n";
  std::string text = absl::StrFormat(
      "iteration %d, ms: forward %.3f, backward %.3f, behind it %.3f\n"
      "%-16s%12s%12s%12s%12s  unit\n",
      timeline.iteration,
      in_ms(between_ns(timeline.forward_begin_ns, timeline.forward_end_ns)),
      in_ms(between_ns(timeline.backward_begin_ns, timeline.backward_end_ns)),
      in_ms(between_ns(timeline.backward_end_ns, timeline.finalize_end_ns)), "",
      "launched", "complete", "overlapped", "exposed");
  const auto append = [&](std::string_view what, const auto& times,
                          int64_t exposed_ns) {
    const auto since_begin = [&](int64_t time_ns) {
      return time_ns == 0
                 ? std::string("-")
                 : absl::StrFormat("%.3f",
                                   in_ms(time_ns - timeline.forward_begin_ns));
    };
    absl::StrAppendFormat(
        &text, "%-16s%12s%12s%12.3f%12.3f  '%s'\n", std::string(what),
        since_begin(times.launch_ns), since_begin(times.complete_ns),
        in_ms(times.travel_ns() - exposed_ns), in_ms(exposed_ns), times.unit);
  };
  for (const GatherTimes& gather : timeline.gathers) {
    append(kGathers[static_cast<size_t>(gather.pass)], gather,
           gather.exposed_ns());
  }
  for (size_t i = 0; i < timeline.reductions.size(); ++i) {
    append("reduction", timeline.reductions[i], timeline.exposed_ns(i));
  }
  return text;
}

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

void ShardingRecorder::step_fails() {
  is_in_step_ = false;
  is_sampling_ = false;
}

void ShardingRecorder::add(std::vector<Launch>& launches, size_t unit) {
  launches.push_back(
      {.unit = unit, .times = {.pass = pass_, .launch_ns = now_ns()}});
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
  auto& gathers = current_.gathers;
  const auto found =
      std::find_if(gathers.rbegin(), gathers.rend(),
                   [&](const Launch& launch) { return launch.unit == unit; });
  return found == gathers.rend() ? nullptr : &*found;
}

void ShardingRecorder::stamp_needed(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather != nullptr && gather->times.needed_ns == 0) {
    stamp(gather->times.needed_ns);
  }
}

void ShardingRecorder::stamp_unsharded(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather == nullptr || gather->times.whole_ns != 0) return;
  if (device_.is_cpu()) {
    for (const auto& arrival : gather->arrivals) arrival->stamp_complete();
  }
  stamp(gather->times.whole_ns);
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
  for (const Launch& launch : last_.gathers) {
    timeline.gathers.push_back(times_of(launch));
    timeline.gathers.back().unit = names[launch.unit];
  }
  for (const Launch& launch : last_.reductions) {
    const GatherTimes times = times_of(launch);
    timeline.reductions.push_back({.unit = names[launch.unit],
                                   .launch_ns = times.launch_ns,
                                   .complete_ns = times.complete_ns});
  }
  return timeline;
}

}  // namespace brigade
