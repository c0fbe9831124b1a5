// Memory of the buffers that unsharded units and their gradients are in: a
// BufferList (fsdp/unshard_buffers.h) with tensors.
//
// On devices with streams a buffer comes back with the point after which it is
// free, and is lent with it: each stream that uses the buffer waits for that
// point first. All memory belongs to a stream of its own, on which nothing
// runs.
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_FSDP_BUFFER_MEMORY_H_
#define BRIGADE_FSDP_BUFFER_MEMORY_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "brigade/fsdp/streams.h"
#include "brigade/fsdp/unshard_buffers.h"

namespace brigade {

// A buffer that is lent. Without memory: none.
struct Lease {
  at::Tensor bytes = {};  // uint8
  size_t number = 0;
  StreamPoint last_use = {};  // of whoever had it before

  explicit operator bool() const { return bytes.defined(); }
};

class BufferMemory {
 public:
  explicit BufferMemory(c10::Device device);
  ~BufferMemory();
  BufferMemory(const BufferMemory&) = delete;
  BufferMemory& operator=(const BufferMemory&) = delete;

  // At least `bytes`, of any content.
  Lease acquire(int64_t bytes);
  // It is free after `last_use`.
  void release(Lease lease, const StreamPoint& last_use);
  // Nobody has used it.
  void release(Lease lease) { release(lease, lease.last_use); }
  // From now on these buffers are kept, and all others are extra. Waits until
  // nothing is lent.
  void plan(std::vector<int64_t> bytes);
  // A segment has ended: extra buffers that are free are freed.
  void drop_extra();
  // They are planned from here on. Returns the plan.
  std::vector<int64_t> keep_extra();

  int64_t total_bytes() const { return list_.total_bytes(); }
  int64_t peak_bytes() const { return peak_bytes_; }
  size_t num_extra() const { return num_extra_; }

 private:
  struct Memory {
    at::Tensor bytes = {};
    StreamPoint last_use = {};
  };

  void adopt_plan();
  void free(Memory memory);

  const c10::Device device_;
  const std::optional<c10::Stream> owner_;  // none on the CPU
  BufferList list_;
  std::vector<Memory> memory_;  // by buffer
  std::optional<std::vector<int64_t>> next_plan_;
  size_t num_lent_ = 0;
  size_t num_extra_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_BUFFER_MEMORY_H_
