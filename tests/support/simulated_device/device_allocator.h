// Gives out device memory as a caching allocator does: a freed block goes back
// to the stream that it was allocated on, which may have it again at once,
// unless another stream's use of it was recorded.
//
// It gives a freed block to the next who asks for its size, as early as it may,
// so that an early free shows.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_ALLOCATOR_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_ALLOCATOR_H_

#include <c10/core/Allocator.h>

#include <cstddef>

namespace brigade::simulated {

class DeviceAllocator final : public c10::Allocator {
 public:
  // On the calling thread's current device, for its current stream there. The
  // bytes are poison.
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;
};

DeviceAllocator& device_allocator();

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_ALLOCATOR_H_
