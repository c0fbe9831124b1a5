// Ranks that hold the same value, for texts that say who differs from whom.
//
// Thread safety: pure functions.

#ifndef BRIGADE_COMM_CAMPS_H_
#define BRIGADE_COMM_CAMPS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/roll_call.h"

namespace brigade {

template <typename T>
struct Camp {
  T value;
  std::vector<int> ranks;
};

// One for each different value, in order of their lowest rank.
template <typename T>
std::vector<Camp<T>> camps_of(const std::vector<T>& by_rank) {
  std::vector<Camp<T>> camps;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    auto camp = std::find_if(camps.begin(), camps.end(), [&](const auto& c) {
      return c.value == by_rank[rank];
    });
    if (camp == camps.end()) {
      camps.push_back({by_rank[rank], {}});
      camp = camps.end() - 1;
    }
    camp->ranks.push_back(static_cast<int>(rank));
  }
  return camps;
}

// "rank 0 has X, ranks 1, 2 have Y"
template <typename T>
std::string describe_camps(const std::vector<T>& by_rank) {
  std::vector<std::string> parts;
  for (const Camp<T>& camp : camps_of(by_rank)) {
    parts.push_back(absl::StrCat(describe_ranks(camp.ranks),
                                 camp.ranks.size() == 1 ? " has " : " have ",
                                 camp.value));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace brigade

#endif  // BRIGADE_COMM_CAMPS_H_
