// The engine of a Reducer: brings the gradients of an iteration to its
// collectives, launches those in one agreed order, and ends the iteration on
// all ranks (iteration_end.h): delivered on all of them, or an error on all.
//
// Buckets and used parameters are DataParallelPolicy's. The engine knows the
// phases of an iteration and which backward belongs to it.
//
//   Engine engine(setup);
//   engine.connect();
//   engine.prepare(outputs);   // after each forward
//   ... backward: gradients become ready, collectives are launched; when it
//   ends, results are delivered.
//
// docs/protocol.md says when each collective is launched, and the consequences
// of a failure.
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
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/iteration_end.h"
#include "brigade/reducer/observations.h"
#include "brigade/reducer/peer_status.h"
#include "brigade/reducer/reducer_setup.h"

namespace brigade {

class Engine {
 public:
  explicit Engine(ReducerSetup setup);

  // Takes the hooks off the variables. Does not wait for collectives in flight.
  // REQUIRES: no backward through the variables is running.
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Once, before anything is prepared. Collective if the options say that ranks
  // are compared; otherwise the first prepare() connects and compares.
  void connect();

  // What of it is constant: the table, the group and the options but the hook.
  const DataParallelPolicy& policy() const { return policy_; }

  // Calls `read(policy)` under the lock that also covers the policy.
  template <typename Read>
  auto locked(const Read& read) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return read(policy_);
  }

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

  // Buckets travel by another hook; null: the default. Ranks compare, if they
  // are connected. Errors: RuntimeError in the middle of an iteration.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  // Variables are told of by gradient_ready() from here on. Errors:
  // RuntimeError in the middle of an iteration.
  void stop_watching_gradients();
  bool is_watching_gradients() const { return !hooks_->are_removed(); }

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
  std::optional<ReductionError> last_error() const {
    return observations_.last_error();
  }

 private:
  // Calls `work` under the lock; notes what it throws as the last error.
  template <typename Work>
  auto noting_errors(const Work& work);

  // REQUIRES: mutex_ held, for all that follow.

  // ---- In a backward.
  void on_output_reached(Preparation preparation);
  void on_local_output_reached();
  void on_backward_end(int64_t preparation, int backward_id);
  void enter_backward(int backward_id);
  void watch_end(int backward_id);
  void begin_reduction();
  void mark_at_begin();
  void accept_gradient(VariableIndex variable, bool is_defined);
  void accept_early_gradient(VariableIndex variable, bool is_defined,
                             int backward_id);
  void mark(size_t variable, Slot slot);
  void launch_ready();
  void deliver_used_map();
  void finish();
  void abort_iteration();

  // ---- Between iterations.
  void connect_ranks();
  void come_together(std::string_view deed);
  void start_iteration();
  bool replan_if_due();
  void require_no_running_backward() const;
  void require_not_reducing(std::string_view caller) const;
  void end_unfinished_iteration();
  void call_between_iterations(std::string_view doing,
                               const std::function<void()>& collective);
  // Drops the iteration that is prepared, if there is one, when ranks differ.
  void agree(Iteration& iteration, const RankStatus& own);
  // Compares the policy's sequence, unless ranks have compared it already.
  void agree_on_sequence(Iteration& iteration);

  // An iteration of the sequence as it is now.
  std::shared_ptr<Iteration> make_iteration(int64_t number) const;
  // Whatever phase it was in, it is over on this rank. Null if there is none.
  std::shared_ptr<Iteration> take_iteration();
  Occasion occasion(int64_t iteration) const;
  bool has_begun() const { return iteration_ && iteration_->has_begun(); }

  // Takes the lock only if it is free.
  std::string describe_progress() const;

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  Observations observations_;
  DataParallelPolicy policy_;
  PeerStatus peers_;
  IterationEnd end_;
  std::shared_ptr<Iteration> iteration_;  // null: none is prepared
  BackwardMembership membership_;
  // Continuations of the hook are watched up to this iteration.
  int64_t watches_continuations_until_;
  bool finalizes_manually_ = false;

  // Callbacks of a backward hold it while they run.
  std::shared_ptr<GradientHooks> hooks_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ENGINE_H_
