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

  // Without the lock only its constants may be read: the table, the group, and
  // the options except for the hook.
  const DataParallelPolicy& policy() const { return policy_; }

  // Calls `read(policy)` under the lock that also covers the policy.
  template <typename Read>
  auto locked(const Read& read) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return read(policy_);
  }

  // Methods without a comment have the contract and the errors of Reducer's
  // method that calls them.

  // ---- An iteration.
  void prepare(std::span<const at::Tensor> outputs);
  void note_local_forward(std::span<const at::Tensor> outputs);
  // `is_defined`: false if no gradient will come. REQUIRES: inside of a
  // backward.
  void gradient_ready(VariableIndex variable, bool is_defined);
  void expect_forwards();
  void shadow();
  void end_iteration();
  void set_manual_finalization(bool required);
  void finalize();

  // ---- Between iterations.
  void await_statuses();
  void meet_peers(std::string_view deed);
  // Calls a collective of all ranks, such as a broadcast of buffers. `doing`:
  // "broadcasting 3 buffers". Ends an iteration that has begun, and awaits
  // statuses as prepare() does. If the collective fails the group is closed.
  void call_before_forward(std::string_view doing,
                           const std::function<void()>& collective);
  bool replan();
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  void stop_watching_gradients();
  bool is_watching_gradients() const { return !hooks_->are_removed(); }
  bool can_continue() const;
  void abort_group();

  // ---- Observation.
  std::vector<size_t> missing_gradients() const;  // variables, by number
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
  // Calls `work` under the lock; notes its exception as the last error.
  template <typename Work>
  auto noting_errors(const Work& work);

  // REQUIRES: mutex_ held, for all that follow.

  // ---- In a backward.
  void on_output_reached(Preparation preparation);
  void on_local_output_reached();
  void on_backward_end(int64_t preparation, int backward_id);
  void report_unannounced(VariableIndex variable);
  void enter_backward(int backward_id);
  void watch_end(int backward_id);
  void begin_reduction();
  void mark_at_begin();
  void accept_gradient(VariableIndex variable, bool is_defined);
  void accept_early_gradient(VariableIndex variable, bool is_defined,
                             int backward_id);
  void mark(size_t variable, Slot slot, bool then_launch = false);
  void launch_ready();
  void launch_in_scope();
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
  std::string describe_missing(const Iteration& iteration) const;
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
  bool expects_forwards_ = false;
  bool has_forward_ = false;  // since the last iteration was reduced
  bool has_warned_ = false;   // of a gradient of no forward

  // Callbacks of a backward hold it while they run.
  std::shared_ptr<GradientHooks> hooks_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ENGINE_H_
