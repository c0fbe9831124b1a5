// Shared memory in which each rank of one host posts its statuses and reads
// those of the others. No thread and no socket: a rank that waits sleeps until
// another one posts, and notices within a second that one has died
// (comm/group/shared_segment.h).
//
// Thread safety: as StatusTransport.

#ifndef BRIGADE_COMM_STATUS_STATUS_BOARD_H_
#define BRIGADE_COMM_STATUS_STATUS_BOARD_H_

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/status/status_transport.h"

namespace brigade {

// Collective. Returns null on all ranks unless they share memory. Throws as
// SharedSegment::make().
std::unique_ptr<StatusTransport> meet_at_status_board(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_STATUS_BOARD_H_
