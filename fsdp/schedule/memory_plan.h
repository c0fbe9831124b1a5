// Which memory a training step is going to need, before it runs: the buffers of
// whole units and of whole gradients, and which use gets which.
//
// A step is gone through as gather_schedule.h launches it: forward by given
// calls of the units, of which some may be inside of others', backward the
// other way round, each unit called once. A use of memory is as long as any
// such program may make it:
//
//   - the gradients of a unit come together, in any order, and are lent again
//     when `max_reducing` reductions of later units may keep theirs; those of
//     one that is called around others, while these are in backward, too;
//   - the first one called, if it is kept from forward to backward, is taken
//     for one around all others: its gradients come and go at any time of
//     backward;
//   - so do those of a unit that spans passes, which is whole to their end;
//   - a unit that backward is not to reach, as a frozen one in front of all
//     that is trained, is not gathered for it;
//   - what is not released behind backward keeps its memory to itself;
//   - a unit that keeps its storage has memory of its own;
//   - gradients that a unit adds up over several backwards have theirs;
//   - the slice that is kept of a unit behind its forward is there until its
//     gather of backward is launched.
//
// So a program that is as expected finds each buffer free, and the bytes that
// it takes are the planned ones. Frozen units that are not released behind
// backward are whole from then on, which later steps don't expect.
//
// Example: six equal units of 256 bytes, depth 1, two reductions.
//
//   plan->total_bytes();  // 4 * 256: two units, two gradients
//
// A step that is not like that is planned as it was recorded
// (schedule/memory_uses.h): each use by itself, in the order in which they
// came.
//
// A plan is a value: no tensors, no memory.
//
// Thread safety: immutable after create(); any thread may read.

#ifndef BRIGADE_FSDP_SCHEDULE_MEMORY_PLAN_H_
#define BRIGADE_FSDP_SCHEDULE_MEMORY_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/fsdp/schedule/memory_uses.h"
#include "brigade/fsdp/schedule/unit_calls.h"
#include "brigade/fsdp/schedule/unit_settings.h"

namespace brigade {

struct PlannedSegment {
  std::optional<int64_t> whole_bytes;     // none: is not gathered
  std::optional<int64_t> gradient_bytes;  // none: is not trained
  // Of a unit that keeps_slices().
  std::optional<int64_t> slice_bytes = std::nullopt;
};

struct PlannedUnit {
  std::vector<PlannedSegment> segments;
  UnitSettings settings;
  bool adds_up_gradients = false;  // over several backwards
  bool is_reached = true;          // by backward
};

class MemoryPlan {
 public:
  MemoryPlan() = default;  // for nothing

  // `calls`: of each unit one. `prefetch_depth`, `max_reducing`: of
  // ShardingOptions. REQUIRES: max_reducing >= 1.
  //
  // Errors: InvalidArgument if the bytes of all uses exceed 2^63 - 1.
  static absl::StatusOr<MemoryPlan> create(std::span<const PlannedUnit> units,
                                           std::span<const UnitCall> calls,
                                           size_t prefetch_depth,
                                           size_t max_reducing);

  // Of a recorded step. Errors: as create().
  static absl::StatusOr<MemoryPlan> create(std::span<const RecordedUse> step);

  // Buffers for uses like this, in the order in which a step is expected to
  // have them; perhaps none.
  std::span<const size_t> of(const MemoryUse& use) const;

  // That of the `time`-th such use in a step, from 0 on; of the last one where
  // a step has more of them.
  std::optional<size_t> buffer_for(const MemoryUse& use, size_t time) const;

  // Whether a step that uses memory so has a buffer for each use: its own if
  // that is free, else the smallest free one that is large enough.
  bool suffices_for(std::span<const RecordedUse> step) const;

  const std::vector<int64_t>& buffer_bytes() const { return buffer_bytes_; }
  int64_t total_bytes() const;  // of all buffers

 private:
  ByUse<std::vector<size_t>> buffers_;
  std::vector<int64_t> buffer_bytes_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_MEMORY_PLAN_H_
