// Memory for whole units and for their gradients, which is lent for a while and
// lent again.
//
// A request takes the smallest free buffer that is large enough, so that units
// of one size share as few buffers as are lent at once; if there is none, a new
// buffer is made, and the largest that is free is given up, so that buffers
// don't pile up as larger ones are asked for.
//
// Thread safety: any thread.

#ifndef BRIGADE_FSDP_MEMORY_POOL_H_
#define BRIGADE_FSDP_MEMORY_POOL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace brigade {

class MemoryPool {
 public:
  explicit MemoryPool(c10::Device device) : device_(device) {}
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // uint8, at least [bytes], aligned as torch aligns. What it holds is
  // anything.
  at::Tensor acquire(int64_t bytes);
  void release(at::Tensor buffer);

  int64_t bytes() const;            // of all buffers, lent and free
  int64_t peak_bytes() const;       // the most there ever were
  int64_t num_allocations() const;  // buffers made so far

 private:
  const c10::Device device_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<at::Tensor> free_;
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t num_allocations_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_MEMORY_POOL_H_
