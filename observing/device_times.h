// When a device with streams passed the steps of an iteration and of its
// units: events between the work of its streams.
//
// Costs one event per step, and nothing waits until somebody asks.
//
// Thread safety: all methods may be called from any thread.

#ifndef BRIGADE_OBSERVING_DEVICE_TIMES_H_
#define BRIGADE_OBSERVING_DEVICE_TIMES_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "brigade/observing/timeline.h"

namespace brigade {

class DeviceTimes {
 public:
  enum Step { kPackBegin, kPackEnd, kLaunch, kComplete };
  enum Mark { kForwardEnd, kBackwardBegin, kBackwardEnd };

  // Forgets all events. Of a unit on another device nothing is recorded.
  void restart(size_t num_units);

  // The calling thread's current stream of `device` is at this step. A device
  // that fails records nothing.
  void record(size_t unit, Step step, c10::Device device) noexcept;
  void record(Mark mark, c10::Device device) noexcept;

  // Replaces the host's times of these steps by the device's, mapped to the
  // steady clock. Waits until the device has passed them.
  void resolve(Timeline& timeline) const;

 private:
  using Event = std::optional<c10::Event>;
  using Events = std::array<Event, 4>;

  void record(Event& event, c10::Device device) noexcept;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<Events> by_unit_;  // by Step
  std::array<Event, 3> marks_;   // by Mark
};

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_DEVICE_TIMES_H_
