#include "brigade/comm/group/rank_names.h"

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/shortened_list.h"
#include "brigade/comm/group/per_group.h"

namespace brigade {

RankNames RankNames::of(const c10d::ProcessGroup& group) {
  const auto known = find_per_group<RankNames>(group);
  return known ? *known : RankNames();
}

RankNames RankNames::of_some(const std::vector<int>& ranks) const {
  RankNames names;
  for (const int rank : ranks) names.numbers_.push_back((*this)[rank]);
  return names;
}

void RankNames::set_for(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
  *per_group<RankNames>(group) = *this;
}

std::string RankNames::describe(int rank, int num_ranks) const {
  if (numbers_.empty()) return absl::StrCat("rank ", rank, " of ", num_ranks);
  return absl::StrCat("rank ", numbers_[rank], ", of ranks ",
                      shortened_list(numbers_.size(),
                                     [this](size_t i) { return numbers_[i]; }));
}

}  // namespace brigade
