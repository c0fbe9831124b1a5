// Ranks that hold the same value, for texts that say who differs from whom.
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_ERRORS_RANKS_BY_VALUE_H_
#define BRIGADE_COMM_ERRORS_RANKS_BY_VALUE_H_

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/liveness_probe.h"

namespace brigade {

template <typename T>
struct RanksOfValue {
  T value;
  std::vector<int> ranks;
};

// One for each different value, in order of their lowest rank.
template <typename T>
std::vector<RanksOfValue<T>> ranks_by_value(const std::vector<T>& by_rank) {
  std::vector<RanksOfValue<T>> groups;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& c) {
      return c.value == by_rank[rank];
    });
    if (group == groups.end()) {
      groups.push_back({by_rank[rank], {}});
      group = groups.end() - 1;
    }
    group->ranks.push_back(static_cast<int>(rank));
  }
  return groups;
}

// "rank 0 has X, ranks 1, 2 have Y"
template <typename T>
std::string describe_by_value(const std::vector<T>& by_rank) {
  std::vector<std::string> parts;
  for (const RanksOfValue<T>& group : ranks_by_value(by_rank)) {
    parts.push_back(absl::StrCat(describe_ranks(group.ranks),
                                 group.ranks.size() == 1 ? " has " : " have ",
                                 group.value));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace brigade

#endif  // BRIGADE_COMM_ERRORS_RANKS_BY_VALUE_H_
