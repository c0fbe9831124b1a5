// Memory of unsharded units and of their gradients: a free list by size.
//
// A request takes the smallest free buffer that is large enough. If there is
// none, the largest free buffer is replaced by one of the requested size; if
// nothing is free, a buffer is added. Steps that repeat a schedule make the
// same requests in the same order, so that soon they allocate nothing.
//
// On devices with streams a buffer comes back with the point after which it is
// free, and is lent with it: each stream that uses the buffer waits for that
// point first. All memory belongs to a stream of its own, on which nothing
// runs.
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_FSDP_UNSHARD_BUFFERS_H_
#define BRIGADE_FSDP_UNSHARD_BUFFERS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/schedule.h"

namespace brigade {

// A buffer that is lent. Without memory: none.
struct Lease {
  at::Tensor bytes = {};      // uint8
  StreamPoint last_use = {};  // of whoever had it before

  explicit operator bool() const { return bytes.defined(); }
};

class UnshardBuffers {
 public:
  explicit UnshardBuffers(c10::Device device);
  ~UnshardBuffers();
  UnshardBuffers(const UnshardBuffers&) = delete;
  UnshardBuffers& operator=(const UnshardBuffers&) = delete;

  // At least `bytes`, of any content. 0: none.
  Lease acquire(int64_t bytes);
  // It is free after `last_use`.
  void release(Lease lease, const StreamPoint& last_use);
  // Nobody has used it.
  void release(Lease lease) { release(lease, lease.last_use); }
  // Frees buffers that are not lent, the last released first, until all take at
  // most `bytes`.
  void shrink_to(int64_t bytes);

  int64_t total_bytes() const { return total_bytes_; }  // lent ones too
  int64_t peak_bytes() const { return peak_bytes_; }
  // By size: number of buffers that are not lent.
  std::map<int64_t, size_t> num_free() const;

 private:
  void free(Lease buffer);

  const c10::Device device_;
  const std::optional<c10::Stream> owner_;  // none on the CPU
  std::vector<Lease> free_;                 // the longest free first
  int64_t total_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// Bytes of a unit's buffers. 0: it needs none.
struct UnitBytes {
  int64_t unsharded = 0;
  int64_t gradients = 0;
};

struct PlannedSegment {
  Schedule schedule = {};
  UnitRules rules = {};
  std::vector<char> stays = {};  // by unit: unsharded after the segment
};

struct BufferPlan {
  std::map<int64_t, size_t> num_buffers = {};  // by size
  size_t num_for_gradients = 0;                // the most at once
  int64_t bytes = 0;
};

// The buffers that steps of these segments come to own: replays the cursor in
// the schedule's order, until a step adds none. Assumes that all ranks repeat
// the schedule, and that an optimizer writes all units after the step. A unit
// around others holds memory for its gradients from the segment's start. Not
// counted: units unsharded by hand, and UnitSettings::keeps_storage.
BufferPlan plan_buffers(std::span<const PlannedSegment> step,
                        std::span<const UnitBytes> units, size_t max_reducing);

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNSHARD_BUFFERS_H_
