// Which buffer each use of a unit's memory gets, and how large buffers are.
//
// Uses are known ahead, as intervals of a recorded schedule: a gather's launch
// until its unit is released, a first gradient until its memory is used again.
// Each takes, in order of its begin, the smallest free buffer that is large
// enough; else the largest free one, which grows; else a new one. Of equal
// buffers the one that has been free longest is taken: whoever used it last is
// waited for the least.
//
// There are as many buffers as uses at once, at most, which no plan undercuts.
// The n-th largest buffer is no larger than the n-th largest use, so for uses
// of one size the bytes are the fewest possible too.
//
// Memory of different kinds or devices has a plan for each. A plan is a value:
// no tensors, no memory.
//
// Example: three equal units, each gathered while the one before is used.
//
//   const std::vector<BufferUse> uses = {
//       {.begin = 0, .end = 2, .bytes = 64},
//       {.begin = 1, .end = 3, .bytes = 64},
//       {.begin = 2, .end = 4, .bytes = 64}};
//   absl::StatusOr<BufferPlan> plan = BufferPlan::create(uses);
//   plan->buffer_of(2);     // 0
//   plan->buffer_bytes();   // {64, 64}
//
// Thread safety: immutable after create(); any thread may read.

#ifndef BRIGADE_FSDP_SCHEDULE_BUFFER_PLAN_H_
#define BRIGADE_FSDP_SCHEDULE_BUFFER_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

// Owns its buffer at begin <= t < end, in positions of the schedule: what ends
// at t is free for what begins at t.
struct BufferUse {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t bytes = 0;

  friend bool operator==(const BufferUse&, const BufferUse&) = default;
};

class BufferPlan {
 public:
  // Uses that begin together are served in the order given. Equal lists have
  // equal plans, on all ranks.
  //
  // Errors:
  //   InvalidArgument  a use ends at or before its begin, or has bytes < 0; the
  //                    bytes of all uses exceed 2^63 - 1.
  static absl::StatusOr<BufferPlan> create(std::span<const BufferUse> uses);

  // REQUIRES: `use` is an index into the list given to create().
  size_t buffer_of(size_t use) const { return buffer_of_[use]; }

  // By buffer, in the order of their first use; each the bytes of its largest.
  const std::vector<int64_t>& buffer_bytes() const { return buffer_bytes_; }

  int64_t total_bytes() const;  // of all buffers

  friend bool operator==(const BufferPlan&, const BufferPlan&) = default;

 private:
  BufferPlan(std::vector<size_t> buffer_of, std::vector<int64_t> buffer_bytes)
      : buffer_of_(std::move(buffer_of)),
        buffer_bytes_(std::move(buffer_bytes)) {}

  std::vector<size_t> buffer_of_;  // by use
  std::vector<int64_t> buffer_bytes_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_BUFFER_PLAN_H_
