// How long the collectives of a group wait for a peer.

#ifndef BRIGADE_COMM_GROUP_TIMEOUT_H_
#define BRIGADE_COMM_GROUP_TIMEOUT_H_

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// The shortest timeout among the group's backends; c10d's default, 30 minutes,
// if none tells its own. Thread safety: pure.
std::chrono::milliseconds group_timeout(c10d::ProcessGroup& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_TIMEOUT_H_
