#include "brigade/observing/timeline_recorder.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <utility>

#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

// Indexed by DeviceTimes::Step.
constexpr std::array<int64_t UnitTimes::*, 4> kTimes = {
    &UnitTimes::pack_begin_ns, &UnitTimes::pack_end_ns, &UnitTimes::launch_ns,
    &UnitTimes::complete_ns};

int64_t elapsed_ns(const c10::Event& from, const c10::Event& to) {
  return static_cast<int64_t>(from.elapsedTime(to) * 1e6);
}

// Returns the steady clock's time at which the device completed `event`.
int64_t steady_time_ns(const c10::Event& event) {
  c10::Event now(event.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  now.record(current_stream(event.device()));
  now.synchronize();
  return now_ns() - elapsed_ns(event, now);
}

// Maps events to the steady clock. Only each device's first event is mapped
// directly; the others are relative to it, so that durations stay exact.
class DeviceClocks {
 public:
  // Does not change `time_ns` if the event was not recorded.
  void read(const std::optional<c10::Event>& event, int64_t& time_ns) {
    if (!event) return;
    event->synchronize();
    const auto [known, is_new] =
        first_.try_emplace(event->device_index(), &*event, 0);
    auto& [first, first_time_ns] = known->second;
    if (is_new) first_time_ns = steady_time_ns(*event);
    time_ns = first_time_ns + elapsed_ns(*first, *event);
  }

 private:
  std::map<c10::DeviceIndex, std::pair<const c10::Event*, int64_t>> first_;
};

}  // namespace

void DeviceTimes::record(Event& event, c10::Device device) noexcept {
  if (device.is_cpu()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    event.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    event->record(current_stream(device));
  } catch (const std::exception&) {
    event.reset();
  }
}

void DeviceTimes::resolve(Timeline& timeline) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  DeviceClocks clocks;
  clocks.read(marks_[kForwardEnd], timeline.forward_end_ns);
  clocks.read(marks_[kBackwardBegin], timeline.backward_begin_ns);
  clocks.read(marks_[kBackwardEnd], timeline.backward_end_ns);
  for (size_t b = 0; b < by_unit_.size(); ++b) {
    for (size_t step = 0; step < kTimes.size(); ++step) {
      clocks.read(by_unit_[b][step], timeline.units[b].*kTimes[step]);
    }
  }
}

// State that futures' callbacks write, possibly after the iteration has ended
// and the recorder was destroyed.
struct Completions : std::enable_shared_from_this<Completions> {
  explicit Completions(size_t num_units)
      : complete_ns(num_units), device_times(num_units) {}

  // Keeps the first time: a waiting thread may wake before the callback runs.
  void complete(size_t unit) {
    int64_t unset = 0;
    complete_ns[unit].compare_exchange_strong(unset, now_ns());
  }

  void complete_after(c10::ivalue::Future& future, size_t unit,
                      c10::Device device) {
    // With uses_future, the callback's current streams wait for the result.
    future.addCallback(
        [self = shared_from_this(), unit, device](c10::ivalue::Future&) {
          self->complete(unit);
          self->device_times.record(unit, DeviceTimes::kComplete, device);
        },
        /*uses_future=*/!device.is_cpu());
  }

  std::vector<std::atomic<int64_t>> complete_ns;
  DeviceTimes device_times;
};

void TimelineRecorder::bind(std::vector<c10::Device> devices,
                            size_t num_variables) {
  if (devices != devices_) sampling_ = false;
  devices_ = std::move(devices);
  num_variables_ = num_variables;
}

void TimelineRecorder::forward_begins(int64_t iteration) {
  if (is_sampled(iteration, sample_rate_)) forward_begin_ns_ = now_ns();
}

void TimelineRecorder::prepared(int64_t iteration) {
  sampling_ = is_sampled(iteration, sample_rate_);
  if (!sampling_) return;
  current_ = {.iteration = iteration,
              .forward_begin_ns = std::exchange(forward_begin_ns_, 0),
              .forward_end_ns = now_ns(),
              .units = std::vector<UnitTimes>(devices_.size())};
  current_.gradients.reserve(num_variables_);
  current_completions_ = std::make_shared<Completions>(devices_.size());
  mark(DeviceTimes::kForwardEnd);
}

void TimelineRecorder::mark(DeviceTimes::Mark mark) {
  if (!devices_.empty()) {
    current_completions_->device_times.record(mark, devices_.front());
  }
}

void TimelineRecorder::stamp(size_t unit, DeviceTimes::Step step) {
  if (!sampling_) return;
  current_.units[unit].*kTimes[step] = now_ns();
  current_completions_->device_times.record(unit, step, devices_[unit]);
}

void TimelineRecorder::stamp_backward() {
  current_.backward_begin_ns = now_ns();
  current_.host_backward_begin_ns = current_.backward_begin_ns;
  mark(DeviceTimes::kBackwardBegin);
}

void TimelineRecorder::launched(size_t unit, c10::ivalue::Future& future) {
  if (sampling_) {
    current_completions_->complete_after(future, unit, devices_[unit]);
  }
}

void TimelineRecorder::waited_for(size_t unit) {
  if (sampling_ && current_.units[unit].launch_ns > 0) {
    current_completions_->complete(unit);
  }
}

void TimelineRecorder::backward_ends() {
  if (!sampling_) return;
  current_.backward_end_ns = now_ns();
  mark(DeviceTimes::kBackwardEnd);
}

void TimelineRecorder::finalized() {
  if (!sampling_) return;
  sampling_ = false;
  for (size_t b = 0; b < current_.units.size(); ++b) {
    current_.units[b].complete_ns = current_completions_->complete_ns[b];
  }
  current_.finalize_end_ns = now_ns();
  last_ = std::move(current_);
  last_completions_ = std::move(current_completions_);
}

Timeline TimelineRecorder::last() const {
  Timeline timeline = last_;
  if (last_completions_) last_completions_->device_times.resolve(timeline);
  return timeline;
}

void ShardingRecorder::set_sample_rate(int64_t sample_rate) {
  TORCH_CHECK_VALUE(sample_rate >= 0,
                    "set_timeline_sample_rate: expected a sample rate >= 0, "
                    "found ",
                    sample_rate, ".\nPass 0 to turn sampling off.");
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
  if (device_.is_cpu()) complete_all(current_.launches[kReduceScatter]);
  stamp(current_.times.finalize_end_ns);
  ++num_steps_;
  is_in_step_ = false;
  pass_ = GatheredIn::kOther;
  if (std::exchange(is_sampling_, false)) last_ = std::exchange(current_, {});
}

void ShardingRecorder::launch_begins(Collective collective, size_t unit,
                                     int64_t bytes) {
  if (!is_sampling_) return;
  current_.launches[collective].push_back(
      {.unit = unit,
       .times = {.pass = pass_, .launch_ns = now_ns(), .bytes = bytes}});
}

void ShardingRecorder::launched(Collective collective,
                                c10::ivalue::Future& future) {
  if (!is_sampling_) return;
  const auto completion = std::make_shared<Completions>(1);
  completion->device_times.record(0, DeviceTimes::kLaunch, device_);
  current_.launches[collective].back().completions.push_back(completion);
  completion->complete_after(future, 0, device_);
}

ShardingRecorder::Launch* ShardingRecorder::last_gather_of(size_t unit) {
  if (!is_sampling_) return nullptr;
  auto& gathers = current_.launches[kAllGather];
  const auto found =
      std::ranges::find(gathers.rbegin(), gathers.rend(), unit, &Launch::unit);
  return found == gathers.rend() ? nullptr : &*found;
}

void ShardingRecorder::needed(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather == nullptr || gather->times.needed_ns != 0) return;
  gather->times.needed_ns = now_ns();
}

// For callers that have awaited the launches.
void ShardingRecorder::complete_all(std::span<const Launch> launches) {
  for (const Launch& launch : launches) {
    for (const auto& completion : launch.completions) completion->complete(0);
  }
}

void ShardingRecorder::unsharded(size_t unit) {
  Launch* const gather = last_gather_of(unit);
  if (gather == nullptr || gather->times.unsharded_ns != 0) return;
  if (device_.is_cpu()) complete_all({gather, 1});
  gather->times.unsharded_ns = now_ns();
}

// The launch of the first flat shard, the completion of the last.
GatherTimes ShardingRecorder::times_of(const Launch& launch) const {
  GatherTimes times = launch.times;
  for (size_t i = 0; i < launch.completions.size(); ++i) {
    Timeline of_device = {.units = std::vector<UnitTimes>(1)};
    UnitTimes& flat = of_device.units.front();
    flat.complete_ns = launch.completions[i]->complete_ns[0];
    if (!device_.is_cpu()) {
      launch.completions[i]->device_times.resolve(of_device);
    }
    if (i == 0 && flat.launch_ns != 0) times.launch_ns = flat.launch_ns;
    times.complete_ns = std::max(times.complete_ns, flat.complete_ns);
  }
  return times;
}

ShardingTimeline ShardingRecorder::timeline(
    const std::vector<std::string>& names) const {
  ShardingTimeline timeline = last_.times;
  for (const Launch& launch : last_.launches[kAllGather]) {
    timeline.gathers.push_back(times_of(launch));
    timeline.gathers.back().unit = names[launch.unit];
  }
  for (const Launch& launch : last_.launches[kReduceScatter]) {
    const GatherTimes times = times_of(launch);
    timeline.reductions.push_back({.unit = names[launch.unit],
                                   .launch_ns = times.launch_ns,
                                   .complete_ns = times.complete_ns,
                                   .bytes = times.bytes});
  }
  return timeline;
}

}  // namespace brigade
