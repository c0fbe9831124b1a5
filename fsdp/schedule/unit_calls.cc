#include "brigade/fsdp/schedule/unit_calls.h"

#include <ranges>

namespace brigade {

std::vector<UnitTurn> turns_of(std::span<const UnitCall> calls) {
  std::vector<UnitTurn> turns;
  std::vector<UnitCall> open;
  const auto end_down_to = [&](size_t depth) {
    while (!open.empty() && open.back().depth >= depth) {
      turns.push_back({.unit = open.back().unit, .begins = false});
      open.pop_back();
    }
  };
  for (const UnitCall& call : calls) {
    end_down_to(call.depth);
    turns.push_back({.unit = call.unit, .begins = true});
    open.push_back(call);
  }
  end_down_to(0);
  return turns;
}

std::vector<size_t> backward_order_of(std::span<const UnitCall> calls) {
  std::vector<size_t> order;
  for (const auto& [unit, begins] : std::views::reverse(turns_of(calls))) {
    if (!begins) order.push_back(unit);
  }
  return order;
}

}  // namespace brigade
