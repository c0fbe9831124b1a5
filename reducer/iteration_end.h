// The end of an iteration on all ranks: they agree on its outcome, and its
// results are delivered or dropped.
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

#ifndef BRIGADE_REDUCER_ITERATION_END_H_
#define BRIGADE_REDUCER_ITERATION_END_H_

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "brigade/comm/status/rank_status.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/data_parallel_policy.h"
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/observations.h"
#include "brigade/reducer/peer_status.h"

namespace brigade {

class IterationEnd {
 public:
  // REQUIRES: all outlive this object.
  IterationEnd(DataParallelPolicy& policy, PeerStatus& peers,
               Observations& observations)
      : policy_(policy), peers_(peers), observations_(observations) {}

  // The policy's sequence has changed. `iteration`, if not null, goes on with
  // it; if it has begun, its entries wait for the same gradients.
  void adopt_sequence(Iteration* iteration);

  // ---- Ranks compare. Throws on all ranks unless they agree: RuntimeError if
  // they differ, PeerError if one has failed or does not answer. What the
  // iteration has launched is dropped then.

  // In a backward, before the first launch of the iteration.
  void begin_together(Iteration& iteration);

  // Elsewhere. The iteration is aborted if it throws.
  void agree(Iteration& iteration, const RankStatus& own);

  // Of a rank that begins an iteration or has changed its sequence.
  RankStatus begin_status() const;

  // ---- Ends.

  // All is launched: ranks end the iteration together, and deliver.
  void finish(const std::shared_ptr<Iteration>& iteration);

  // After an error: tells the peers, unless they know. Does not throw.
  void abort(Iteration& iteration);

  // Throws `failure` with its place in front. A peer's failure closes the
  // group. REQUIRES: its collective exists.
  [[noreturn]] void raise(Iteration& iteration, const Failure& failure);

  // The engine is destroyed: buffers live until collectives in flight are done.
  void let_go(const Iteration& iteration);

  // ---- Ends that are confirmed later.

  // True if the host does not wait for results: all of them are on devices.
  bool runs_ahead() const;

  // Awaits the statuses of all delivered iterations. Throws PeerError or
  // RuntimeError if one has failed; the group is closed then.
  void confirm_ends();

  // Awaits them down to the number that may be unconfirmed, and takes those
  // that have come. Throws as confirm_ends().
  void confirm_due_ends();

  // Why delivered results are wrong; empty: they are right.
  const std::string& late_failure() const { return late_failure_; }

 private:
  using Patience = std::optional<std::chrono::milliseconds>;

  struct UnconfirmedEnd {
    std::shared_ptr<Iteration> iteration;
    RankStatus sent;
  };

  // On devices, whose collectives don't block the host.
  bool may_defer_status(const Iteration& iteration) const {
    return runs_ahead() && iteration.chained.empty();
  }

  // Sends `own` of this iteration, and does not wait.
  RankStatus send(const Iteration& iteration, RankStatus own);

  // Sends `own` and awaits all. If ranks differ, all have launched the same
  // when this returns, or `must_close` is set. Closes the group and throws
  // PeerError if peers do not answer within `patience`.
  StatusComparison exchange(Iteration& iteration, const RankStatus& own,
                            Patience patience);
  void catch_up(Iteration& iteration, const RankStatus& own,
                StatusComparison& found, Patience patience);

  // As exchange(); if ranks differ, waits for the launches and drops results.
  StatusComparison compare(Iteration& iteration, RankStatus own,
                           Patience patience = std::nullopt);

  // Launches zeros for the rest of the sequence. Returns an error; empty: none.
  std::string launch_substitutes(Iteration& iteration);

  void deliver_together(Iteration& iteration);
  void deliver_unconfirmed(const std::shared_ptr<Iteration>& iteration,
                           const RankStatus& end);
  void exchange_results(Iteration& iteration, StatusKind kind,
                        const std::optional<Failure>& failure);
  [[noreturn]] void tell_of_failure(Iteration& iteration,
                                    const Failure& failure);
  void require_delivered(Iteration& iteration,
                         const std::optional<Failure>& failure);
  void over(const Iteration& iteration, Outcome outcome);

  void drop_results(Iteration& iteration);
  // Gives gradients other memory than collectives that may never end.
  void abandon_buffers(Iteration& iteration);
  void confirm_oldest_end();

  DataParallelPolicy& policy_;
  PeerStatus& peers_;
  Observations& observations_;
  std::deque<UnconfirmedEnd> unconfirmed_ends_;  // oldest first
  std::string late_failure_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ITERATION_END_H_
