// How many ranks of a group are on each host: the length of a row, where what
// is sharded is to be gathered within hosts only.
//
// Hosts are told apart as where ranks share memory
// (comm/group/shared_segment.h): two containers, or network namespaces, are two
// hosts.

#ifndef BRIGADE_COMM_RANKS_OF_HOST_H_
#define BRIGADE_COMM_RANKS_OF_HOST_H_

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

// Collective. The same number on all ranks, of ranks next to each other.
//
// Errors: on all ranks alike ValueError if hosts have unlike numbers of ranks,
// ranks of a host are not next to each other, or a rank does not know its host;
// PeerError if ranks don't meet.
int ranks_of_a_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// The same of hosts by rank, of which there is at least one; 0: not known.
// Errors: InvalidArgument. Thread safety: pure.
absl::StatusOr<int> ranks_of_a_host(const std::vector<int64_t>& host_by_rank);

}  // namespace brigade

#endif  // BRIGADE_COMM_RANKS_OF_HOST_H_
