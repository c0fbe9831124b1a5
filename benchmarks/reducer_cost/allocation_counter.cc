#include "brigade/benchmarks/reducer_cost/allocation_counter.h"

#include <c10/core/CPUAllocator.h>

namespace brigade::benchmarks {
namespace {

constexpr uint8_t kPriority = 100;  // above the one that is there

}  // namespace

AllocationCounter::AllocationCounter() : wrapped_(c10::GetCPUAllocator()) {
  c10::SetCPUAllocator(this, kPriority);
}

AllocationCounter::~AllocationCounter() {
  c10::SetCPUAllocator(wrapped_, kPriority);
}

c10::DataPtr AllocationCounter::allocate(size_t num_bytes) {
  ++count_;
  return wrapped_->allocate(num_bytes);
}

c10::DeleterFnPtr AllocationCounter::raw_deleter() const {
  return wrapped_->raw_deleter();
}

void AllocationCounter::copy_data(void* to, const void* from,
                                  size_t num_bytes) const {
  wrapped_->copy_data(to, from, num_bytes);
}

}  // namespace brigade::benchmarks
