// End of an iteration on all ranks: they exchange statuses, and all deliver or
// all drop the results.
//
// On the CPU a failed rank sends its status and awaits all statuses. Then it
// launches zeros for the rest of its sequence; earlier they could meet a
// collective of the program. If a rank can't launch zeros, all close the group.
//
// On devices a failed rank launches zeros at once. Statuses are awaited up to
// max_unconfirmed_iterations later. The results are delivered by then, so a
// failure closes the group.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_ITERATION_END_H_
#define BRIGADE_REDUCER_ITERATION_END_H_

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "brigade/comm/status/status_channel.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/data_parallel_policy.h"
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/peer_status.h"

namespace brigade {

class IterationEnd {
 public:
  // REQUIRES: all outlive this object.
  IterationEnd(DataParallelPolicy& policy, PeerStatus& peers,
               Observations& observations)
      : policy_(policy), peers_(peers), observations_(observations) {}

  // Takes over the policy's new sequence, also in `iteration` unless null. If
  // that has begun, the entries must wait for the same gradients.
  void adopt_sequence(Iteration* iteration);

  // ---- Comparisons. Throw on all ranks, and drop the iteration's results:
  // RuntimeError if ranks differ, PeerError if one has failed or does not
  // answer.

  // REQUIRES: a backward runs; nothing is launched.
  void compare_begin(Iteration& iteration);

  // Aborts the iteration if it throws.
  void agree(Iteration& iteration, const RankStatus& own);

  RankStatus begin_status() const;

  // ---- Ends.

  // Ends the iteration and delivers its results. REQUIRES: all is launched.
  // Throws as agree(), and the errors of collectives and deliveries.
  void finish(const std::shared_ptr<Iteration>& iteration);

  // Number of iterations that all ranks have reduced, though this rank may have
  // failed to deliver some.
  int64_t num_reduced() const { return num_reduced_; }

  // Ends a failed iteration: sends the failure unless peers know it. Does not
  // throw.
  void abort(Iteration& iteration);

  // Throws `failure` with its place in front. A peer's failure closes the
  // group. REQUIRES: its collective exists.
  [[noreturn]] void raise(Iteration& iteration, const Failure& failure);

  // Keeps the buffers alive until the collectives in flight are complete.
  void release_in_flight(const Iteration& iteration);

  // ---- Unconfirmed ends: statuses that are sent and not yet awaited.

  // Returns true if all buckets are on devices: the host does not wait.
  bool runs_ahead() const;

  // Awaits all. Closes the group and throws PeerError or RuntimeError if an
  // iteration has failed on a peer.
  void confirm_ends();

  // As confirm_ends(), for a limited time. Returns false, and closes nothing,
  // if statuses are still missing then.
  bool confirm_ends_within(std::chrono::milliseconds timeout);

  // Awaits all but the last max_unconfirmed_iterations, and takes those that
  // are complete. Throws as confirm_ends().
  void confirm_due_ends();

  // Returns the error of a delivered iteration; empty: none.
  const std::string& late_failure() const { return late_failure_; }

 private:
  // nullopt: the group's.
  using Timeout = std::optional<std::chrono::milliseconds>;

  struct UnconfirmedEnd {
    std::shared_ptr<Iteration> iteration;
    RankStatus sent;
  };

  // Returns true on devices, unless chained collectives block the host anyway.
  bool may_defer_status(const Iteration& iteration) const {
    return runs_ahead() && iteration.chained.empty();
  }

  RankStatus send(const Iteration& iteration, RankStatus own);

  // Sends `own` and awaits all. If ranks differ, then on return all have
  // launched the same entries, or `must_close` is set. If a peer does not
  // answer, closes the group and throws PeerError.
  StatusComparison exchange(Iteration& iteration, const RankStatus& own,
                            Timeout timeout);
  void catch_up(Iteration& iteration, const RankStatus& own,
                StatusComparison& found, Timeout timeout);

  // As exchange(); if ranks differ, also drops the results.
  StatusComparison compare(Iteration& iteration, RankStatus own,
                           Timeout timeout = std::nullopt);

  // Calls launch_rest(). Returns its error's text; empty: none.
  std::string launch_substitutes(Iteration& iteration);

  void deliver_together(Iteration& iteration);
  void deliver_unconfirmed(const std::shared_ptr<Iteration>& iteration,
                           const RankStatus& end);
  void exchange_results(Iteration& iteration, StatusKind kind,
                        const std::optional<Failure>& failure);
  [[noreturn]] void send_and_throw(Iteration& iteration,
                                   const Failure& failure);
  void require_delivered(Iteration& iteration,
                         const std::optional<Failure>& failure);
  void record(const Iteration& iteration, Outcome outcome);

  void drop_results(Iteration& iteration);
  // Moves gradients to new buckets: collectives in flight keep the old ones.
  void abandon_buffers(Iteration& iteration);
  void confirm_oldest_end();

  DataParallelPolicy& policy_;
  PeerStatus& peers_;
  Observations& observations_;
  std::deque<UnconfirmedEnd> unconfirmed_ends_;  // oldest first
  std::string late_failure_;
  int64_t num_reduced_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ITERATION_END_H_
