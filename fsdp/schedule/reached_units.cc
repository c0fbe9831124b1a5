#include "brigade/fsdp/schedule/reached_units.h"

#include <algorithm>

namespace brigade {

std::vector<char> assumed_reached(std::span<const UnitCall> calls,
                                  const std::vector<char>& is_trained) {
  std::vector<char> reached(is_trained.size(), 1);
  bool may_have_graph = false;
  for (const auto& [unit, begins] : turns_of(calls)) {
    if (begins) {
      may_have_graph |= is_trained[unit] != 0;
    } else if (!may_have_graph) {
      reached[unit] = 0;
    }
  }
  return reached;
}

void ReachedUnits::on_begun_together(bool are_alike) {
  are_alike_ = are_alike;
  if (!are_alike) return;
  last_alike_ = reached_;
  for (size_t unit = 0; unit < reached_.size(); ++unit) {
    if (reached_[unit] != 0 || seen_[unit] == kUnknown) {
      seen_[unit] = reached_[unit];
    }
  }
}

std::vector<char> ReachedUnits::expected(
    const std::vector<char>& assumed) const {
  std::vector<char> expected = assumed;
  for (size_t unit = 0; unit < expected.size(); ++unit) {
    if (seen_[unit] != kUnknown) expected[unit] = seen_[unit];
  }
  return expected;
}

void ReachedUnits::forget() {
  last_alike_.clear();
  std::ranges::fill(seen_, kUnknown);
}

}  // namespace brigade
