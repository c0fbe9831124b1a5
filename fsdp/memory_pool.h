// Memory for whole units and for their gradients, which is lent for a while and
// lent again.
//
// A request takes the smallest free buffer that is large enough, so that units
// of one size share as few buffers as are lent at once; if there is none, a new
// buffer is made, and the largest that is free is given up, so that buffers
// don't pile up as larger ones are asked for.
//
// On devices with streams memory comes with the point behind which it is free,
// and the host does not wait for that. It all belongs to a stream of the pool's
// own, on which nothing runs: the pool orders new memory, and what it gives up,
// behind that one and before it.
//
// Thread safety: any thread.

#ifndef BRIGADE_FSDP_MEMORY_POOL_H_
#define BRIGADE_FSDP_MEMORY_POOL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "brigade/fsdp/stream_point.h"

namespace brigade {

struct Buffer {
  at::Tensor memory = {};  // uint8; undefined: none
  // Who uses the memory waits for it first, each stream for itself.
  StreamPoint last_use = {};
};

class MemoryPool {
 public:
  explicit MemoryPool(c10::Device device);
  // REQUIRES: what is still lent is dropped by somebody who has told the
  // allocator of the streams that use it (record_stream).
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // At least [bytes], aligned as torch aligns. What it holds is anything.
  Buffer acquire(int64_t bytes);
  // `last_use`: of whoever had it.
  void release(Buffer buffer);

  c10::Device device() const { return device_; }
  // The stream that its memory belongs to; none on the CPU.
  const std::optional<c10::Stream>& owner() const { return owner_; }
  int64_t bytes() const;            // of all buffers, lent and free
  int64_t peak_bytes() const;       // the most there ever were
  int64_t num_allocations() const;  // buffers made so far

 private:
  void give_up(Buffer buffer);

  const c10::Device device_;
  const std::optional<c10::Stream> owner_;  // of all memory; none on the CPU
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::vector<Buffer> free_;
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t num_allocations_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_MEMORY_POOL_H_
