// Agreement of the ranks: the exchange of statuses, and the steps that bring
// all ranks to the same place after a difference or a failure.
//
// A rank that fails sends its status. When all ranks have sent theirs, it
// launches zeros for the rest of its sequence. Earlier, zeros could meet a
// collective of the program, such as batch norm over ranks. On devices it
// launches them at once. If a rank can't launch its zeros, all ranks close the
// group.
//
// On devices the status of an iteration is sent when it ends and awaited some
// iterations later (ReducerOptions::max_unconfirmed_iterations). Results have
// been delivered by then, so a failure closes the group.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_RANK_AGREEMENT_H_
#define BRIGADE_REDUCER_RANK_AGREEMENT_H_

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "brigade/comm/status/rank_status.h"
#include "brigade/reducer/data_parallel_policy.h"
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/observations.h"
#include "brigade/reducer/peer_status.h"

namespace brigade {

class RankAgreement {
 public:
  // REQUIRES: all outlive this object.
  RankAgreement(DataParallelPolicy& policy, PeerStatus& peers,
                Observations& observations)
      : policy_(policy), peers_(peers), observations_(observations) {}

  // The status of a rank that begins an iteration or has another sequence.
  RankStatus begin_status() const;

  // Sends `own` of this iteration, and does not wait. Throws as
  // PeerStatus::send().
  RankStatus send(const Iteration& iteration, RankStatus own);

  // Sends `own` and awaits all. If ranks do not agree, they have come to the
  // same place when this returns, or `must_close` is set. Throws PeerError,
  // after it has closed the group, if peers do not answer within `patience`.
  StatusComparison exchange(Iteration& iteration, const RankStatus& own,
                            std::optional<std::chrono::milliseconds> patience);

  // Launches zeros for what is left of a sequence. Returns why that can't be
  // done; empty: it is done.
  std::string launch_substitutes(Iteration& iteration);

  // ---- Ends that are confirmed later.

  // True if the host does not wait for results: all of them are on devices.
  bool runs_ahead() const;

  // True if results are delivered before peers are known to have ended the
  // iteration: on devices, whose collectives don't block the host.
  bool may_defer_status(const Iteration& iteration) const {
    return runs_ahead() && iteration.chained.empty();
  }

  // Sends `own` of this iteration, to be awaited by confirm_ends(). Throws as
  // send().
  void defer(std::shared_ptr<Iteration> iteration, const RankStatus& own);

  // Awaits the statuses of all iterations that were delivered before. Throws
  // PeerError or RuntimeError if one of them has failed; the group is closed
  // then.
  void confirm_ends();

  // Awaits them down to the number that may be unconfirmed when an iteration
  // begins, and takes the statuses that have come already. Throws as
  // confirm_ends().
  void confirm_due_ends();

  // The reason why results that were delivered are wrong; empty: they are
  // right.
  const std::string& late_failure() const { return late_failure_; }

 private:
  struct UnconfirmedEnd {
    std::shared_ptr<Iteration> iteration;
    RankStatus sent;
  };

  void confirm_oldest_end();
  void catch_up(Iteration& iteration, const RankStatus& own,
                StatusComparison& found,
                std::optional<std::chrono::milliseconds> patience);

  DataParallelPolicy& policy_;
  PeerStatus& peers_;
  Observations& observations_;
  std::deque<UnconfirmedEnd> unconfirmed_ends_;  // oldest first
  std::string late_failure_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_RANK_AGREEMENT_H_
