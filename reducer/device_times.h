// When a CUDA device passed the steps of its buckets: events between the work
// of its streams.
//
// Costs one event per step, and nothing waits until somebody asks.
//
// Thread safety: all methods may be called from any thread.

#ifndef BRIGADE_REDUCER_DEVICE_TIMES_H_
#define BRIGADE_REDUCER_DEVICE_TIMES_H_

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "brigade/reducer/timeline.h"

namespace brigade {

class DeviceTimes {
 public:
  enum Step { kPackBegin, kPackEnd, kLaunch, kComplete };

  // Forgets all events. Of a bucket on another device nothing is recorded.
  void restart(size_t num_buckets);

  // The calling thread's current stream of `device` is at this step.
  void record(size_t bucket, Step step, c10::Device device);

  // Replaces the host's times of these steps by the device's, mapped to the
  // steady clock. Waits until the device has passed them.
  void resolve(std::vector<BucketTimes>& buckets) const;

 private:
  using Steps = std::array<std::optional<c10::Event>, 4>;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<Steps> by_bucket_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DEVICE_TIMES_H_
