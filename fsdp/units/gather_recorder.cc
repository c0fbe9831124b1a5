#include "brigade/fsdp/units/gather_recorder.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "brigade/engine/observing/device_times.h"
#include "brigade/engine/observing/steady_time.h"
#include "brigade/engine/observing/timeline.h"

namespace brigade {

struct GatherRecorder::Arrival {
  // The first time counts: whoever has waited may be told before callbacks are.
  void stamp_complete() {
    int64_t none = 0;
    complete_ns.compare_exchange_strong(none, now_ns());
  }

  std::atomic<int64_t> complete_ns = 0;
  DeviceTimes device_times;  // of one unit
};

void GatherRecorder::forward_begins(int64_t iteration) {
  if (is_sampling_ && current_.iteration == iteration) return;
  is_sampling_ = TimelineRecorder::is_sampled(iteration, sample_rate_);
  if (!is_sampling_) return;
  current_ = {.iteration = iteration, .forward_begin_ns = now_ns()};
}

void GatherRecorder::stamp_forward_end() { current_.forward_end_ns = now_ns(); }

void GatherRecorder::add(size_t unit, GatheredIn pass) {
  current_.gathers.push_back(
      {.unit = unit, .pass = pass, .launch_ns = now_ns()});
}

void GatherRecorder::watch(c10::ivalue::Future& future) {
  const auto arrival = std::make_shared<Arrival>();
  if (!device_.is_cpu()) {
    arrival->device_times.restart(1);
    arrival->device_times.record(0, DeviceTimes::kLaunch, device_);
  }
  current_.gathers.back().arrivals.push_back(arrival);
  // A callback that uses the future runs on streams that wait for its value.
  future.addCallback(
      [arrival, device = device_](c10::ivalue::Future&) {
        arrival->stamp_complete();
        arrival->device_times.record(0, DeviceTimes::kComplete, device);
      },
      /*uses_future=*/!device_.is_cpu());
}

GatherRecorder::Gather* GatherRecorder::last_of(size_t unit) {
  const auto found = std::find_if(
      current_.gathers.rbegin(), current_.gathers.rend(),
      [&](const Gather& gather) {
        return gather.unit == unit && gather.pass != GatheredIn::kOther;
      });
  return found == current_.gathers.rend() ? nullptr : &*found;
}

void GatherRecorder::stamp_needed(size_t unit) {
  Gather* const gather = last_of(unit);
  if (gather != nullptr && gather->needed_ns == 0) gather->needed_ns = now_ns();
}

void GatherRecorder::stamp_whole(size_t unit) {
  Gather* const gather = last_of(unit);
  if (gather == nullptr || gather->whole_ns != 0) return;
  if (device_.is_cpu()) {
    for (const auto& arrival : gather->arrivals) arrival->stamp_complete();
  }
  gather->whole_ns = now_ns();
}

void GatherRecorder::finish(const std::vector<size_t>& reduced) {
  is_sampling_ = false;
  current_.reduced = reduced;
  last_ = std::exchange(current_, {});
}

void GatherRecorder::fill_in(ShardingTimeline& timeline,
                             const std::vector<std::string>& names) const {
  if (timeline.iteration == 0 || last_.iteration != timeline.iteration) return;
  timeline.forward_begin_ns = last_.forward_begin_ns;
  timeline.forward_end_ns = last_.forward_end_ns;
  const size_t num_reduced =
      std::min(last_.reduced.size(), timeline.reductions.size());
  for (size_t i = 0; i < num_reduced; ++i) {
    timeline.reductions[i].unit = names[last_.reduced[i]];
  }
  for (const Gather& gather : last_.gathers) {
    GatherTimes times = {.unit = names[gather.unit],
                         .pass = gather.pass,
                         .launch_ns = gather.launch_ns,
                         .needed_ns = gather.needed_ns,
                         .whole_ns = gather.whole_ns};
    for (size_t i = 0; i < gather.arrivals.size(); ++i) {
      Timeline of_device = {.units = std::vector<UnitTimes>(1)};
      UnitTimes& unit = of_device.units.front();
      unit.complete_ns = gather.arrivals[i]->complete_ns;
      if (!device_.is_cpu())
        gather.arrivals[i]->device_times.resolve(of_device);
      if (i == 0 && unit.launch_ns != 0) times.launch_ns = unit.launch_ns;
      times.complete_ns = std::max(times.complete_ns, unit.complete_ns);
    }
    timeline.gathers.push_back(std::move(times));
  }
}

}  // namespace brigade
