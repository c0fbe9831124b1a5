#include "brigade/observing/device_times.h"

#include <map>

#include "brigade/comm/streams/stream_join.h"
#include "brigade/observing/steady_time.h"

namespace brigade {
namespace {

int64_t elapsed_ns(const c10::Event& from, const c10::Event& to) {
  return static_cast<int64_t>(from.elapsedTime(to) * 1e6);
}

// Maps the events of one device to the steady clock. Times between them stay
// exact to what the device tells of two events that are close to each other.
class DeviceClock {
 public:
  explicit DeviceClock(const c10::Event& reference) : reference_(reference) {
    c10::Event now(reference.device_type(), c10::EventFlag::BACKEND_DEFAULT);
    now.record(current_stream(reference.device()));
    now.synchronize();
    reference_time_ns_ = now_ns() - elapsed_ns(reference, now);
  }

  int64_t time_ns(const c10::Event& event) const {
    return reference_time_ns_ + elapsed_ns(reference_, event);
  }

 private:
  const c10::Event& reference_;
  int64_t reference_time_ns_ = 0;
};

class Clocks {
 public:
  // Leaves `time_ns` alone if nothing was recorded.
  void read(const std::optional<c10::Event>& event, int64_t& time_ns) {
    if (!event) return;
    event->synchronize();
    const auto [clock, is_new] =
        by_device_.try_emplace(event->device_index(), *event);
    time_ns = clock->second.time_ns(*event);
  }

 private:
  std::map<c10::DeviceIndex, DeviceClock> by_device_;
};

}  // namespace

void DeviceTimes::restart(size_t num_units) {
  const std::lock_guard<std::mutex> lock(mutex_);
  by_unit_.resize(num_units);
  for (Events& steps : by_unit_) steps = {};
  marks_ = {};
}

void DeviceTimes::record(size_t unit, Step step, c10::Device device) noexcept {
  if (device.is_cpu()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  record(by_unit_[unit][step], device);
}

void DeviceTimes::record(Mark mark, c10::Device device) noexcept {
  if (device.is_cpu()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  record(marks_[mark], device);
}

void DeviceTimes::record(Event& event, c10::Device device) noexcept {
  try {
    event.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    event->record(current_stream(device));
  } catch (const std::exception&) {
    event.reset();
  }
}

void DeviceTimes::resolve(Timeline& timeline) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Clocks clocks;
  clocks.read(marks_[kForwardEnd], timeline.forward_end_ns);
  clocks.read(marks_[kBackwardBegin], timeline.backward_begin_ns);
  clocks.read(marks_[kBackwardEnd], timeline.backward_end_ns);
  for (size_t b = 0; b < by_unit_.size(); ++b) {
    UnitTimes& unit = timeline.units[b];
    clocks.read(by_unit_[b][kPackBegin], unit.pack_begin_ns);
    clocks.read(by_unit_[b][kPackEnd], unit.pack_end_ns);
    clocks.read(by_unit_[b][kLaunch], unit.launch_ns);
    clocks.read(by_unit_[b][kComplete], unit.complete_ns);
  }
}

}  // namespace brigade
