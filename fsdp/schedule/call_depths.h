// How deep units are called inside of each other in forward: as was seen last,
// and before that as their names say ("blocks.1.mlp" inside of "blocks.1").
//
// Of several calls in one forward the deepest counts.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_SCHEDULE_CALL_DEPTHS_H_
#define BRIGADE_FSDP_SCHEDULE_CALL_DEPTHS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "brigade/fsdp/schedule/unit_calls.h"

namespace brigade {

class CallDepths {
 public:
  // By unit.
  explicit CallDepths(const std::vector<std::string>& names);

  void begin_forward() { ++forward_; }
  // A call begins, and so many of other units are around it.
  void note(size_t unit, size_t depth);

  size_t of(size_t unit) const { return seen_[unit].depth; }
  // A call of each unit, in this order.
  std::vector<UnitCall> calls(std::span<const size_t> order) const;

 private:
  struct Seen {
    int64_t forward;  // which it was
    size_t depth;
  };

  int64_t forward_ = 0;
  std::vector<Seen> seen_;  // by unit
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_CALL_DEPTHS_H_
