// How many collectives a group has launched on this rank, by whomever: a
// reducer, batch norm over ranks, the user.

#ifndef BRIGADE_COMM_COLLECTIVE_COUNT_H_
#define BRIGADE_COMM_COLLECTIVE_COUNT_H_

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// Of all its backends together, and in memory that its ranks share
// (comm/ordered/host_sums.h); nothing if one does not count (Gloo and NCCL do).
// Only differences mean something: what the count starts at is the backend's
// business.  Slow where it is not known, since that is an exception inside
// LibTorch.
std::optional<int64_t> count_collectives(c10d::ProcessGroup& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_COLLECTIVE_COUNT_H_
