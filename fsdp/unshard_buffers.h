// Memory of unsharded units and of their gradients: a free list of buffers.
//
// A request takes the smallest free buffer that is large enough. If none is,
// replaces the largest free buffer by one of the requested size; if nothing is
// free, allocates. Steps that repeat a schedule repeat its requests, so they
// soon allocate nothing.
//
// On devices with streams each buffer carries the stream point of its last use.
// A stream that uses the buffer waits for that point first. All buffers are
// allocated on a separate stream, on which nothing runs.
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
  // Makes the buffer free after `last_use`.
  void release(Lease lease, const StreamPoint& last_use);
  // The same for a lease that was not used.
  void release(Lease lease) { release(lease, lease.last_use); }
  // Deallocates free buffers, last released first, until the total is at most
  // `bytes`.
  void shrink_to(int64_t bytes);

  int64_t total_bytes() const { return total_bytes_; }  // free and in use
  int64_t peak_bytes() const { return peak_bytes_; }
  // Returns the number of free buffers by size.
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
  Schedule schedule = {};
  UnitRules rules = {};
  std::vector<char> stays = {};  // by unit: unsharded after the segment
};

struct BufferPlan {
  std::map<int64_t, size_t> num_buffers = {};  // by size
  size_t num_for_gradients = 0;                // peak
  int64_t bytes = 0;
};

// Returns the buffers allocated after repeated steps of these segments. Replays
// the schedules until a step allocates nothing. Assumes that all ranks follow
// the schedules, and that an optimizer writes all units after the step. A unit
// that contains others holds memory for its gradients from the segment's start.
// Not counted: ShardedModel::unshard() and UnitSettings::keeps_storage.
BufferPlan plan_buffers(std::span<const PlannedSegment> step,
                        std::span<const UnitBytes> units, size_t max_reducing);

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNSHARD_BUFFERS_H_
