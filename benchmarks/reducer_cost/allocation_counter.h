// Counts the tensor memory that is asked for while it lives.
//
// Puts itself between ATen and its CPU allocator.  Tensors that are made
// meanwhile may outlive it.
//
// Thread safety: one at a time; may be made while no other thread allocates.

#ifndef BRIGADE_BENCHMARKS_REDUCER_COST_ALLOCATION_COUNTER_H_
#define BRIGADE_BENCHMARKS_REDUCER_COST_ALLOCATION_COUNTER_H_

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>

namespace brigade::benchmarks {

class AllocationCounter : private c10::Allocator {
 public:
  AllocationCounter();
  ~AllocationCounter() override;
  AllocationCounter(const AllocationCounter&) = delete;
  AllocationCounter& operator=(const AllocationCounter&) = delete;

  int64_t count() const { return count_; }

 private:
  c10::DataPtr allocate(size_t num_bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t num_bytes) const override;

  c10::Allocator* const wrapped_;
  std::atomic<int64_t> count_ = 0;
};

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_REDUCER_COST_ALLOCATION_COUNTER_H_
