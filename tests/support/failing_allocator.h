// Allocations of CPU tensors that fail on request, on one thread: ranks are
// threads.
//
//   const AllocationFailures failures;
//   failures.fail(/*number=*/2, /*bytes=*/4096);
//   ... the third allocation of at least 4096 bytes throws c10::Error

#ifndef BRIGADE_TESTS_SUPPORT_FAILING_ALLOCATOR_H_
#define BRIGADE_TESTS_SUPPORT_FAILING_ALLOCATOR_H_

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <limits>

namespace brigade::testing {

// Replaces the CPU allocator while it lives; tensors may live longer. Thread
// safety: fail() and stop() act on the calling thread.
class AllocationFailures {
 public:
  AllocationFailures() {
    static Allocator& allocator = *new Allocator();
    c10::SetCPUAllocator(&allocator);
  }
  ~AllocationFailures() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator()); }

  // Makes allocation `number` (from 0) of at least `bytes` throw, once.
  void fail(int number, size_t bytes) const {
    num_left_ = number;
    least_bytes_ = bytes;
  }
  void stop() const { least_bytes_ = kNever; }

 private:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();
  static inline thread_local size_t least_bytes_ = kNever;
  static inline thread_local int num_left_ = 0;

  struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
      if (bytes >= least_bytes_ && num_left_-- == 0) {
        least_bytes_ = kNever;
        TORCH_CHECK(false, "can't allocate memory: ", bytes, " bytes");
      }
      return c10::GetDefaultCPUAllocator()->allocate(bytes);
    }
    c10::DeleterFnPtr raw_deleter() const override {
      return c10::GetDefaultCPUAllocator()->raw_deleter();
    }
    void copy_data(void* to, const void* from, size_t bytes) const override {
      default_copy_data(to, from, bytes);
    }
  };
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_FAILING_ALLOCATOR_H_
