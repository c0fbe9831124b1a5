#include "brigade/fsdp/live_calls.h"

#include <algorithm>

namespace brigade {

std::shared_ptr<void> LiveCalls::begin(size_t unit, int64_t num_writes,
                                       bool has_graph) {
  Unit& called = units_[unit];
  called.called_behind = num_writes;
  called.is_recomputed |= !has_graph;
  return called.held;
}

// What was called without a graph that is seen has had its backward, or none.
void LiveCalls::backward_over() {
  if (std::ranges::any_of(units_, is_held)) return;
  for (Unit& unit : units_) unit.called_behind.reset();
}

}  // namespace brigade
