// Transports of a StatusChannel: shared memory, or all-gathers. Internal to
// comm/.
//
// Thread safety: none.

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

// Number of exchanges that a rank may have sent and not yet received.
inline constexpr int64_t kMaxStatusesInFlight = 40;

// The awaited status can't arrive. The text names the rank and the reason.
class RankLost : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class StatusTransport {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Other ranks that wait for a later exchange then get an error.
  virtual ~StatusTransport() = default;

  // Sends this rank's status of exchange `own.sequence` (1, 2, ...) without
  // blocking. REQUIRES: at most kMaxStatusesInFlight exchanges have not been
  // received.
  virtual void send(const RankStatus& own) = 0;

  // Returns true if receive() would not block.
  virtual bool is_complete(int64_t sequence) = 0;

  // Blocks until all ranks have sent exchange `sequence` and returns their
  // statuses by rank; nullopt at the deadline. Called once per sequence, in any
  // order. Throws RankLost, or the collective's error.
  virtual std::optional<std::vector<RankStatus>> receive(int64_t sequence,
                                                         Deadline deadline) = 0;

  // Ends the waits of other ranks with an error now, before the destructor.
  virtual void abort(const RankStatus& last) = 0;

  // Returns the ranks whose processes are known to have ended.
  virtual std::vector<int> dead_ranks() { return {}; }
};

// Collective. Makes the transport through shared memory, which detects a dead
// rank within a second. Returns null on all ranks unless they share memory.
// Throws as SharedSegment::make().
std::unique_ptr<StatusTransport> make_shared_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Collective. Makes the transport by all-gathers, on a subgroup of all ranks,
// so that they are never matched with the group's other collectives. A group
// written in Python has no subgroups: its own all-gather is used. If the group
// serves devices only, statuses are gathered in device memory and copied to
// pinned memory. Throws as make_subgroup().
std::unique_ptr<StatusTransport> make_gathering_status_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_STATUS_TRANSPORT_H_
