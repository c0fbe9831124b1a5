// Carries rank statuses between the ranks of a group. Internal to comm/.
//
// Thread safety: none; the owning StatusChannel locks.

#ifndef BRIGADE_COMM_STATUS_STATUS_TRANSPORT_H_
#define BRIGADE_COMM_STATUS_STATUS_TRANSPORT_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/status/rank_status.h"

namespace brigade {

// The number of exchanges that a rank may have sent and not yet received.
inline constexpr int64_t kMaxStatusesInFlight = 40;

// The awaited status will not come. The text names the rank and the reason.
class RanksAbsent : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class StatusTransport {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Other ranks that wait for a later exchange get an error.
  virtual ~StatusTransport() = default;

  // Sends this rank's status of exchange `own.sequence` and returns at once.
  // Sequences count from 1. REQUIRES: at most kMaxStatusesInFlight exchanges
  // have not been received.
  virtual void send(const RankStatus& own) = 0;

  // Returns true if receive() would not block.
  virtual bool is_complete(int64_t sequence) = 0;

  // Blocks until all ranks have sent exchange `sequence` and returns their
  // statuses by rank; nullopt at the deadline. Called once per sequence, in any
  // order. Throws RanksAbsent, or the collective's error.
  virtual std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                         Deadline deadline) = 0;

  // Ends the exchanges that other ranks wait for, before the destructor.
  virtual void give_up(const RankStatus& last) = 0;

  // Returns the ranks whose processes are known to have ended.
  virtual std::vector<int> dead_ranks() { return {}; }
};

// Collective. Transport through memory that the ranks of one host share: each
// posts its statuses and reads the others'. A rank that waits sleeps until
// another one posts, and notices within a second that one has died. Returns
// null on all ranks unless they share memory. Throws as SharedSegment::make().
std::unique_ptr<StatusTransport> meet_at_status_board(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Collective. Transport by all-gathers, where ranks can't share memory. They
// run on a subgroup of all ranks, and so never meet the group's other
// collectives. A group written in Python has no backend to make one of; its own
// all-gather is used. Where the group serves devices only, statuses travel in
// device memory and come back through a copy to pinned memory. Throws as
// make_subgroup().
std::unique_ptr<StatusTransport> gather_statuses_over(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_STATUS_TRANSPORT_H_
