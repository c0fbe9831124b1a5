// How long the collectives of a group wait for a peer.

#ifndef BRIGADE_COMM_GROUP_GROUP_TIMEOUT_H_
#define BRIGADE_COMM_GROUP_GROUP_TIMEOUT_H_

#include <chrono>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace brigade {

// The shortest timeout among the group's backends; if none tells its own, what
// the group was made with, or c10d's default, 30 minutes. Thread safety: any
// thread.
std::chrono::milliseconds group_timeout(c10d::ProcessGroup& group);

// What the group was made with. Thread safety: any thread.
void remember_timeout(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_COMM_GROUP_GROUP_TIMEOUT_H_
