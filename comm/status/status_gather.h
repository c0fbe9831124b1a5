// Statuses by all-gathers: between hosts, or where ranks can't share memory.
//
// A group with backends gets a subgroup of all its ranks for them, so that they
// never meet the group's other collectives. A group written in Python has no
// backend to make one of; its own all-gather is used. Where the group serves
// devices only, statuses travel in device memory and come back through a copy
// to pinned memory.
//
// Thread safety: as StatusTransport.

#ifndef BRIGADE_COMM_STATUS_STATUS_GATHER_H_
#define BRIGADE_COMM_STATUS_STATUS_GATHER_H_

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/status/status_transport.h"

namespace brigade {

// Collective. Throws as make_subgroup().
std::unique_ptr<StatusTransport> gather_statuses_over(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_STATUS_GATHER_H_
