// Carries rank statuses between the ranks of a group: through shared memory on
// one host (comm/status/status_board.h), by all-gathers between hosts
// (comm/status/status_gather.h). Internal to comm/.
//
// Thread safety: none; the owning StatusChannel locks.

#ifndef BRIGADE_COMM_STATUS_STATUS_TRANSPORT_H_
#define BRIGADE_COMM_STATUS_STATUS_TRANSPORT_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
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

  // Tells the other ranks that this one takes no part in later exchanges.
  virtual void leave(const RankStatus& last) = 0;

  // Ends the exchanges that other ranks wait for.
  virtual void give_up(const RankStatus& last) = 0;

  // Returns the ranks whose processes are known to have ended.
  virtual std::vector<int> dead_ranks() { return {}; }
};

}  // namespace brigade

#endif  // BRIGADE_COMM_STATUS_STATUS_TRANSPORT_H_
