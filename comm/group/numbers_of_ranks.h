// What each rank of a group says, a number.
//
// Thread safety: as the group's collectives.

#ifndef BRIGADE_COMM_GROUP_NUMBERS_OF_RANKS_H_
#define BRIGADE_COMM_GROUP_NUMBERS_OF_RANKS_H_

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

// Collective. By rank. `doing`: of this rank, "could not tell the others its
// host". Errors: PeerError if ranks don't meet.
std::vector<int64_t> numbers_of_ranks(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t own,
    const char* doing);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_NUMBERS_OF_RANKS_H_
