// Counts the CPU memory of tensors that is asked for while it lives: it puts
// itself between ATen and its allocator. Tensors that are made meanwhile may
// outlive it.
//
// Thread safety: one at a time; may be made while no other thread allocates.

#ifndef BRIGADE_BENCHMARKS_SUPPORT_ALLOCATION_COUNTER_H_
#define BRIGADE_BENCHMARKS_SUPPORT_ALLOCATION_COUNTER_H_

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>

namespace brigade::benchmarks {

class AllocationCounter : private c10::Allocator {
 public:
  AllocationCounter() : wrapped_(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, kPriority);
  }
  ~AllocationCounter() override { c10::SetCPUAllocator(wrapped_, kPriority); }
  AllocationCounter(const AllocationCounter&) = delete;
  AllocationCounter& operator=(const AllocationCounter&) = delete;

  int64_t count() const { return count_; }

 private:
  static constexpr uint8_t kPriority = 100;  // above the one that is there

  c10::DataPtr allocate(size_t num_bytes) override {
    ++count_;
    return wrapped_->allocate(num_bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return wrapped_->raw_deleter();
  }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    wrapped_->copy_data(to, from, num_bytes);
  }

  c10::Allocator* const wrapped_;
  std::atomic<int64_t> count_ = 0;
};

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_SUPPORT_ALLOCATION_COUNTER_H_
