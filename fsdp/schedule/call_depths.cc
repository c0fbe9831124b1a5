#include "brigade/fsdp/schedule/call_depths.h"

#include <algorithm>
#include <string_view>
#include <unordered_set>

namespace brigade {

CallDepths::CallDepths(const std::vector<std::string>& names) {
  const std::unordered_set<std::string_view> known(names.begin(), names.end());
  for (const std::string_view name : names) {
    size_t depth = !name.empty() && known.contains("") ? 1 : 0;
    for (size_t dot = name.find('.'); dot != std::string_view::npos;
         dot = name.find('.', dot + 1)) {
      if (known.contains(name.substr(0, dot))) ++depth;
    }
    seen_.push_back({.forward = 0, .depth = depth});
  }
}

std::vector<UnitCall> CallDepths::calls(std::span<const size_t> order) const {
  std::vector<UnitCall> calls;
  for (const size_t unit : order) {
    calls.push_back({.unit = unit, .depth = of(unit)});
  }
  return calls;
}

void CallDepths::note(size_t unit, size_t depth) {
  Seen& seen = seen_[unit];
  const bool is_first = seen.forward != forward_;
  seen = {.forward = forward_,
          .depth = is_first ? depth : std::max(seen.depth, depth)};
}

}  // namespace brigade
