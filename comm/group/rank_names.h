// What the ranks of a group are called in errors: a part of another group has
// their numbers there, which is what users count by.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_GROUP_RANK_NAMES_H_
#define BRIGADE_COMM_GROUP_RANK_NAMES_H_

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

class RankNames {
 public:
  RankNames() = default;  // a rank's own number

  // Of a group that make_subgroup() has made, and any other.
  static RankNames of(const c10d::ProcessGroup& group);

  // Of ranks of a group with these names, in rising order.
  RankNames of_some(const std::vector<int>& ranks) const;

  // `group` has these from here on.
  void set_for(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const;

  int operator[](int rank) const {
    return numbers_.empty() ? rank : numbers_[rank];
  }

  // "rank 1 of 4"; of a part "rank 6, of ranks 2, 6".
  std::string describe(int rank, int num_ranks) const;

 private:
  std::vector<int> numbers_;  // by rank; empty: their own
};

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_RANK_NAMES_H_
