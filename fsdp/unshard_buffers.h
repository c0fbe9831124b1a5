// Memory of unsharded units and of their gradients: a free list of buffers.
//
// A request takes the smallest free buffer that is large enough, otherwise
// replaces the largest free one by one of the requested size, otherwise
// allocates. Steps that repeat a schedule soon allocate nothing.
//
// On devices each buffer carries the stream point of its last use, which the
// next user's stream must wait for. Buffers are allocated on a separate stream,
// on which nothing runs.
//
// Thread safety: none; the owner serializes calls.

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

// A buffer in use. Empty: no buffer.
struct Lease {
  at::Tensor bytes = {};      // uint8
  StreamPoint last_use = {};  // by the previous user

  explicit operator bool() const { return bytes.defined(); }
};

class UnshardBuffers {
 public:
  explicit UnshardBuffers(c10::Device device);
  ~UnshardBuffers();
  UnshardBuffers(const UnshardBuffers&) = delete;
  UnshardBuffers& operator=(const UnshardBuffers&) = delete;

  // Returns at least `bytes` of uninitialized memory; for 0, an empty lease.
  Lease acquire(int64_t bytes);
  void release(Lease lease, const StreamPoint& last_use);
  // For a lease that was not used.
  void release(Lease lease) { release(lease, lease.last_use); }
  // Deallocates free buffers, last released first, until at most `bytes` are
  // allocated.
  void shrink_to(int64_t bytes);

  int64_t total_bytes() const { return total_bytes_; }  // free and in use
  int64_t peak_bytes() const { return peak_bytes_; }
  // By size: number of free buffers.
  std::map<int64_t, size_t> num_free() const;

 private:
  void deallocate(Lease buffer);

  const c10::Device device_;
  const std::optional<c10::Stream> owner_;  // none on the CPU
  std::vector<Lease> free_;                 // in the order of release
  int64_t total_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

// Bytes of a unit's buffers. 0: no buffer.
struct UnitBytes {
  int64_t unsharded = 0;
  int64_t gradients = 0;
};

struct PlannedSegment {
  Schedule schedule = {};  // as learned
  UnitRules rules = {};
  std::vector<char> stays = {};  // by unit: unsharded after the segment
};

struct BufferPlan {
  std::map<int64_t, size_t> num_buffers = {};  // by size
  size_t num_for_gradients = 0;                // peak
  int64_t bytes = 0;
};

// Returns the buffers of repeated steps of these segments, by replaying the
// schedules until a step allocates nothing. Assumes that all ranks follow the
// schedules, that an optimizer writes all units after the step, and that a unit
// which contains others holds gradient memory from the segment's start. Not
// counted: ShardedModel::unshard() and UnitSettings::keeps_storage.
BufferPlan plan_buffers(std::span<const PlannedSegment> step,
                        std::span<const UnitBytes> units, size_t max_reducing);

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNSHARD_BUFFERS_H_
