// An all-gather of a few numbers of each rank of a group.
//
// Thread safety: as the group's collectives.

#ifndef BRIGADE_COMM_GROUP_NUMBERS_OF_RANKS_H_
#define BRIGADE_COMM_GROUP_NUMBERS_OF_RANKS_H_

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

// Collective. Returns the `own` numbers of all ranks, by rank: the same count
// on each. `doing`: of this rank, "could not tell the others its host". Errors:
// PeerError if ranks don't meet.
std::vector<int64_t> numbers_of_ranks(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<int64_t>& own, const char* doing);

inline std::vector<int64_t> numbers_of_ranks(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t own,
    const char* doing) {
  return numbers_of_ranks(group, std::vector<int64_t>{own}, doing);
}

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_NUMBERS_OF_RANKS_H_
