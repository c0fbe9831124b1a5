// Calls of units in a forward, some inside of others, and what backward makes
// of them. Values.

#ifndef BRIGADE_FSDP_SCHEDULE_UNIT_CALLS_H_
#define BRIGADE_FSDP_SCHEDULE_UNIT_CALLS_H_

#include <cstddef>
#include <span>
#include <vector>

namespace brigade {

// Lists of calls are in the order in which they begin. One is inside of the
// last before it that has a smaller depth.
struct UnitCall {
  size_t unit;
  size_t depth = 0;  // how many calls are around it

  friend bool operator==(const UnitCall&, const UnitCall&) = default;
};

// Where a unit's call begins or ends.
struct UnitTurn {
  size_t unit;
  bool begins;

  friend bool operator==(const UnitTurn&, const UnitTurn&) = default;
};

// Of a forward. Backward has them the other way round: a unit's begins where
// its call has ended.
std::vector<UnitTurn> turns_of(std::span<const UnitCall> calls);

// Units in the order in which their backwards begin.
std::vector<size_t> backward_order_of(std::span<const UnitCall> calls);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_UNIT_CALLS_H_
