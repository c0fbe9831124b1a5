// Memory for whole units and for their gradients, which is lent for a while and
// lent again.
//
// What is known ahead has a buffer by plan (fsdp/schedule/memory_plan.h), which
// is made when it is first used. A request that has none, or finds its own
// lent, as where a program is not as expected, takes the smallest free buffer
// that is large enough; if there is none, a new one is made, and the largest
// free one that is not of the plan is given up, so that buffers don't pile up
// as larger ones are asked for. One that no step uses any more is given up,
// too. What a step has used is recorded, so that a plan can be made of it.
//
// On devices with streams memory comes with the point behind which it is free,
// and the host does not wait for that. It all belongs to a stream of the pool's
// own, on which nothing runs: the pool orders new memory, and what it gives up,
// behind that one and before it.
//
// Thread safety: any thread.

#ifndef BRIGADE_FSDP_MEMORY_MEMORY_POOL_H_
#define BRIGADE_FSDP_MEMORY_MEMORY_POOL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "brigade/fsdp/schedule/memory_plan.h"
#include "brigade/fsdp/schedule/memory_uses.h"
#include "brigade/fsdp/schedule/step_plans.h"
#include "brigade/fsdp/streams/stream_point.h"

namespace brigade {

struct Buffer {
  at::Tensor memory = {};  // uint8; undefined: none
  // Who uses the memory waits for it first, each stream for itself.
  StreamPoint last_use = {};
  std::optional<size_t> planned = std::nullopt;  // which of its plan's it is
  size_t plan_number = 0;
  std::optional<size_t> use = std::nullopt;  // of the record, its number
};

class MemoryPool {
 public:
  explicit MemoryPool(c10::Device device);
  // REQUIRES: what is still lent is dropped by somebody who has told the
  // allocator of the streams that use it (record_stream).
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // In place of the plan before. What is free is given up, unless a buffer is
  // planned of just that size. What is lent since earlier steps becomes its
  // buffer of the plan when it comes back, if it has that size; all else that
  // is lent is of no plan any more.
  void plan(MemoryPlan plan);

  // At least [bytes], aligned as torch aligns. What it holds is anything.
  // `use`: what for; none: what no step has.
  Buffer acquire(int64_t bytes, std::optional<MemoryUse> use = std::nullopt);
  // As it was lent, but for `last_use`: of whoever had it. Its use ends.
  void release(Buffer buffer);
  // A use ends whose memory comes back without it, as it was, at some time.
  void end_use(size_t number);

  // Whether what is acquired from here on is part of the step; at first it is
  // not.
  void set_recording(bool value);
  // What has happened since this was called before; another step begins.
  RecordedStep end_step();

  // A step is over: what is not of the plan, and was not lent in it, is given
  // up.
  void give_up_unused();

  c10::Device device() const { return device_; }
  // The stream that its memory belongs to; none on the CPU.
  const std::optional<c10::Stream>& owner() const { return owner_; }
  int64_t bytes() const;            // of all buffers, lent and free
  int64_t peak_bytes() const;       // the most there ever were
  int64_t num_allocations() const;  // buffers made so far
  int64_t num_unplanned() const;    // those of them that are not of the plan

 private:
  struct Planned {
    int64_t bytes;
    bool is_free = true;
    Buffer buffer = {};  // while it is free; no memory before its first use
  };

  struct Unplanned {
    Buffer buffer;
    bool was_lent = true;  // in this step
  };

  Buffer acquire_memory(int64_t bytes, std::optional<size_t> planned);
  void come_back(Buffer buffer, std::optional<size_t> awaited);
  std::optional<size_t> end_of_use(size_t number);

  static int64_t size_of(const Unplanned& unplanned);
  static int64_t size_of(const Planned& planned) { return planned.bytes; }
  static bool fits(const Unplanned& unplanned, int64_t bytes);
  static bool fits(const Planned& planned, int64_t bytes);
  template <typename Buffers>
  static auto smallest_fit(Buffers& buffers, int64_t bytes);

  Buffer lend(Planned& planned);
  Buffer make(int64_t bytes);
  void give_up_largest();
  void give_up(Buffer buffer);

  const c10::Device device_;
  const std::optional<c10::Stream> owner_;  // of all memory; none on the CPU
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  MemoryPlan plan_;
  size_t plan_number_ = 0;
  std::vector<Planned> planned_;  // its buffers
  // Of these, those whose memory was lent when they were planned, by its use.
  std::map<size_t, size_t> awaited_;
  UseRecord record_;
  bool is_recording_ = false;
  bool was_enough_ = true;  // the plan, in this step
  std::vector<Unplanned> free_;
  int64_t bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t num_allocations_ = 0;
  int64_t num_unplanned_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_MEMORY_MEMORY_POOL_H_
