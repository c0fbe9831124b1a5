// The engine of a Reducer: brings the gradients of an iteration to its
// collectives, launches those in one agreed order, and leads all ranks to the
// same end: delivered on all of them, or an error on all.
//
// Buckets and used parameters are DataParallelPolicy's. The engine knows the
// phases of an iteration (reducer/phase.h), which backward belongs to it, and
// what peers have done.
//
//   Engine engine(policy);
//   engine.connect();
//   engine.prepare(outputs);   // after each forward
//   ... backward: gradients become ready, collectives are launched; when it
//   ends, results are delivered.
//
// docs/protocol.md says what is launched when, and what happens when something
// fails.
//
// Thread safety: any thread, one call at a time; gradients on several threads
// at once. Order of locks: the engine's, then Python's GIL, then a future's or
// a store's own. The stall watch only tries the engine's.

#ifndef BRIGADE_REDUCER_ENGINE_H_
#define BRIGADE_REDUCER_ENGINE_H_

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "brigade/hooks/gradient_hooks.h"
#include "brigade/observing/timeline.h"
#include "brigade/reducer/backward_membership.h"
#include "brigade/reducer/data_parallel_policy.h"
#include "brigade/reducer/failure.h"
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/observations.h"
#include "brigade/reducer/peer_status.h"
#include "brigade/reducer/phase.h"
#include "brigade/reducer/rank_agreement.h"
#include "brigade/reducer/statistics.h"

namespace brigade {

class Engine {
 public:
  // REQUIRES: `policy` outlives this object.
  explicit Engine(DataParallelPolicy& policy);

  // Takes the hooks off the variables. Does not wait for collectives in flight.
  // REQUIRES: no backward through the variables is running.
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Ranks connect, all of which have compared what the policy's sequence is
  // made of. Collective, once; or connect_later(): the first prepare() does,
  // and compares.
  void connect();
  void connect_later() { peers_.connect_later(); }

  // ---- An iteration.

  // The next backward will be reduced; one that is prepared and has not begun
  // is replaced. Collective where ranks connect or the sequence changes.
  // Errors: those of end_iteration(); RuntimeError if the variables do not fit.
  void prepare(std::span<const at::Tensor> outputs);

  // A forward has run whose gradients are not an iteration's: a backward that
  // goes through its outputs, and none that were prepared, stays on this rank.
  void note_local_forward(std::span<const at::Tensor> outputs);

  // The gradient of a variable has been accumulated: for variables that are not
  // watched any more. Or none will come: `is_defined` is false then. REQUIRES:
  // inside of a backward.
  void gradient_ready(VariableIndex variable, bool is_defined);

  // Launches substitutes for all entries of an iteration, and delivers nothing.
  void shadow();

  // An iteration that has begun gets no more gradients. Errors: RuntimeError
  // naming what is missing, on all ranks.
  void end_iteration();

  // While set, an iteration ends in finalize() and not with its backward.
  // Errors: RuntimeError between a forward and the end of its iteration.
  void set_manual_finalization(bool required);

  // Delivers. Errors: RuntimeError if it is not to be called, or gradients are
  // missing; what the end of a backward throws otherwise.
  void finalize();

  // ---- Between iterations.

  // Blocks until all ranks are known to have ended the iterations that were
  // delivered before. Not collective. Throws PeerError or RuntimeError if one
  // has failed, also in later calls; the group is closed then.
  void await_statuses();

  // Compares with all ranks that each is about to do `deed`, outside of a
  // backward: before a collective of the caller's own. Does nothing
  // on devices, where the host does not wait for other ranks.
  // Throws as end_iteration(), and on all ranks unless they agree.
  void meet_peers(std::string_view deed);

  // Calls a collective of all ranks before a forward, such as a broadcast of
  // buffers. `doing`: "broadcasting 3 buffers". Ends an iteration that has
  // begun, and awaits statuses as prepare() does. Throws as end_iteration() and
  // await_statuses(); PeerError if the collective fails, and the group is
  // closed then.
  void call_before_forward(std::string_view doing,
                           const std::function<void()>& collective);

  // The policy changes its sequence, if a change is due. Returns whether it
  // was. Collective then.
  bool replan();

  // `change` makes the policy's entries travel in another way, and returns
  // whether they are other ones. Ranks compare, if they are connected.
  // `caller`: for the error in the middle of an iteration, RuntimeError.
  void change_sequence(std::string_view caller,
                       const std::function<bool()>& change);

  // Variables are told of by gradient_ready() from here on. Errors:
  // RuntimeError in the middle of an iteration.
  void stop_watching_gradients(std::string_view caller);
  bool is_watching_gradients() const { return !hooks_->are_removed(); }

  // Calls `read` under the lock that also covers the policy.
  template <typename Read>
  auto locked(const Read& read) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return read();
  }

  // ---- A group that is lost.

  bool can_continue() const;

  // A collective of the caller's has failed by the network: ends what peers may
  // be blocked in.
  void abort_group();

  // ---- What can be observed.

  // What an iteration that has begun waits for; by number.
  std::vector<size_t> missing_gradients() const;
  ReducerStatistics statistics() const;
  void forward_begins();
  Timeline timeline() const;
  void set_timeline_sample_rate(int64_t sample_rate);
  void set_stall_report_after(std::chrono::milliseconds time);
  void set_stall_handler(std::function<void(const std::string&)> handler);
  std::optional<ReductionError> last_error() const;
  const GradientHooks& hooks() const { return *hooks_; }

 private:
  // ---- Called by a backward (engine_backward.cc).
  void on_output_reached(Preparation preparation);
  void on_local_output_reached();
  void on_backward_end(int64_t preparation, int backward_id);
  void on_backward_abandoned(int64_t preparation);

  // REQUIRES: mutex_ held, for all that follow.
  void enter_backward(int backward_id);
  void watch_end(int backward_id);
  void begin_reduction();
  void begin_together();
  void mark_at_begin();
  void accept_gradient(VariableIndex variable, bool is_defined);
  void accept_early_gradient(VariableIndex variable, bool is_defined,
                             int backward_id);
  void mark(size_t variable, Slot slot);
  void launch_ready();
  void deliver_used_map();

  // ---- Between iterations (engine.cc).
  void connect_ranks();
  void come_together(std::string_view deed);
  void start_iteration();
  bool replan_if_due();
  void adopt_sequence();
  void require_no_running_backward() const;
  void end_unfinished_iteration();
  void call_between_iterations(std::string_view doing,
                               const std::function<void()>& collective);

  // An iteration of the sequence as it is now.
  std::shared_ptr<Iteration> make_iteration(int64_t number) const;
  // Whatever phase it was in, it is over on this rank. Null if there is none.
  std::shared_ptr<Iteration> take_iteration();
  Occasion occasion(int64_t iteration) const;

  // Takes the lock only if it is free.
  std::string describe_progress() const;

  // ---- The end of an iteration (engine_end.cc).

  // Nothing is launched any more. The first words are kept.
  void failed(const std::exception_ptr& error);

  // Throws it with its place in front. A peer's failure closes the group and is
  // told to those that still answer. REQUIRES: its collective is there.
  [[noreturn]] void raise(const Failure& failure, int64_t iteration);

  // Compares the policy's sequence, unless ranks have compared it already.
  // Throws as end_together().
  void agree_on_sequence(Iteration& iteration);

  // Exchanges `own`. Throws on all ranks unless they agree: RuntimeError if
  // they differ, PeerError if one has failed or does not answer. The iteration
  // is aborted then.
  void end_together(Iteration& iteration, const RankStatus& own);

  // Exchanges `own`; if ranks do not agree, waits for what the iteration has
  // launched and drops it. Throws PeerError if peers do not answer within
  // `patience`.
  StatusComparison compare(
      Iteration& iteration, RankStatus own,
      std::optional<std::chrono::milliseconds> patience = std::nullopt);

  // Ends the running iteration after an error and tells the peers, unless they
  // know. Does not throw: an error is on its way already.
  void abort_iteration();

  // All is launched: ranks end the iteration together, and deliver.
  void finish();
  void deliver_together(Iteration& iteration);
  void deliver_unconfirmed(const std::shared_ptr<Iteration>& iteration,
                           const RankStatus& end);
  void exchange_results(Iteration& iteration, StatusKind kind,
                        const std::optional<Failure>& failure);
  [[noreturn]] void tell_of_failure(Iteration& iteration,
                                    const Failure& failure);
  void require_delivered(const Iteration& iteration,
                         const std::optional<Failure>& failure);

  void drop_results(Iteration& iteration);
  // Keeps the memory of collectives that may never end, and gives the gradients
  // other memory.
  void abandon_buffers(Iteration& iteration);

  // Callbacks of a backward hold it while they run.
  std::shared_ptr<GradientHooks> hooks_;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  DataParallelPolicy& policy_;
  Observations observations_;
  PeerStatus peers_;
  RankAgreement agreement_;
  Phase phase_ = Phase::kIdle;
  std::shared_ptr<Iteration> iteration_;  // null iff is_between(phase_)
  BackwardMembership membership_;
  // Continuations of the hook are watched up to this iteration.
  int64_t watches_continuations_until_;
  bool finalizes_manually_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ENGINE_H_
