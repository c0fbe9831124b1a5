// Buffers of unsharded units and of their gradients: which use gets which.
//
// A free list by size. A use takes the smallest free buffer that is large
// enough. While planning, if there is none, the largest free one grows; if
// nothing is free, a new one is made. A step that goes as planned makes the
// same requests in the same order, so it gets the planned buffers, and its peak
// is the planned one. A step that does not takes extra buffers, which are
// counted.
//
// plan_buffers() is a pure function of a step's schedules, sizes and rules.
// Sizes are numbers here: no tensors, no memory.
//
// Example: a forward of equal units, each gathered while the one before is
// used.
//
//   const UnshardPlan plan = plan_buffers({&forward, 1}, sizes);
//   plan.buffer_bytes;  // {64, 64}
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_FSDP_UNSHARD_BUFFERS_H_
#define BRIGADE_FSDP_UNSHARD_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "brigade/fsdp/schedule.h"

namespace brigade {

class BufferList {
 public:
  // The buffers that exist; no request makes one of these grow.
  explicit BufferList(std::vector<int64_t> bytes = {});

  // A free buffer of at least `bytes`, by its number: from the list, else an
  // extra one. Equal ones: that which has been free longest.
  size_t acquire(int64_t bytes);
  // While planning: one of the list, which grows or is added.
  size_t acquire_or_grow(int64_t bytes);
  void release(size_t buffer);
  // Extra buffers that are free are forgotten; others when they are released.
  void drop_extra();
  // They belong to the list from here on.
  void keep_extra() { num_planned_ = buffers_.size(); }

  int64_t bytes_of(size_t buffer) const { return buffers_[buffer].bytes; }
  bool is_extra(size_t buffer) const { return buffer >= num_planned_; }
  size_t size() const { return buffers_.size(); }
  size_t num_planned() const { return num_planned_; }
  size_t num_extra() const { return num_extra_; }  // made since the beginning
  std::vector<int64_t> planned_bytes() const;
  int64_t total_bytes() const;  // of all that exist
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  struct Buffer {
    int64_t bytes = 0;
    bool is_free = true;
    uint64_t free_since = 0;
  };

  size_t take(size_t buffer);
  size_t smallest_fit(int64_t bytes) const;
  size_t add(int64_t bytes);

  std::vector<Buffer> buffers_;  // those of the list, then extra ones
  size_t num_planned_;
  size_t num_extra_ = 0;
  uint64_t time_ = 0;
  int64_t peak_bytes_ = 0;
};

struct UnitBytes {
  int64_t unsharded = 0;
  int64_t gradients = 0;  // unreduced; 0: is not trained
};

// One forward or backward of a step.
struct SegmentPlan {
  RecordedSchedule schedule;
  UnitRules rules;
};

struct UnshardPlan {
  std::vector<int64_t> buffer_bytes;
  int64_t peak_bytes = 0;

  friend bool operator==(const UnshardPlan&, const UnshardPlan&) = default;
};

// Of a rank that uses the units of each all-gather in the schedules' order.
// Units that stay at a segment's end are held until the next one releases them.
// `max_reducing`: buffers of gradients at a time, at least 1;
// the next unit's gradients wait for the oldest.
UnshardPlan plan_buffers(std::span<const SegmentPlan> step,
                         const std::vector<UnitBytes>& sizes,
                         size_t max_reducing = 2);

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNSHARD_BUFFERS_H_
