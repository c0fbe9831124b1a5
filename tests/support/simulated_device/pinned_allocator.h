// Gives out pinned host memory as a caching host allocator does: what is freed
// while a copy still reads or writes it is held back until the host has waited
// for that.
//
// Thread safety: any thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_PINNED_ALLOCATOR_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_PINNED_ALLOCATOR_H_

#include <c10/core/Allocator.h>

#include <cstddef>

namespace brigade::simulated {

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;
};

PinnedAllocator& pinned_allocator();

bool is_pinned(const void* address);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_PINNED_ALLOCATOR_H_
