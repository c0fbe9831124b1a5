// Engine of a Reducer: accepts the gradients of an iteration, launches its
// collectives in one order on all ranks, and ends it on all ranks together
// (iteration_end.h): either all deliver the results, or all throw.
//
// DataParallelPolicy owns the buckets and the used-parameter map.
// docs/internals.md describes the order of launches and the consequences of a
// failure.
//
// Thread safety: any thread, one call at a time; gradients may arrive on
// several threads at once. Lock order: the engine's mutex, then Python's GIL,
// then the mutex of a future or store.

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

#include "brigade/hooks/autograd_hooks.h"
#include "brigade/observing/stall_watch.h"
#include "brigade/observing/timeline.h"
#include "brigade/reducer/data_parallel_policy.h"
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/iteration_end.h"
#include "brigade/reducer/peer_status.h"

namespace brigade {

class Engine {
 public:
  // Collective: connects the ranks for statuses. Without verify_across_ranks
  // the first prepare() connects them.
  explicit Engine(ReducerSetup setup);

  // Awaits unconfirmed ends for 5 s at most, and prints a failure to stderr.
  // Removes the hooks from the variables. Does not wait for collectives in
  // flight. REQUIRES: no backward through the variables is running.
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Implement Reducer's methods, with the same contracts and errors.
  void prepare(std::span<const at::Tensor> outputs);
  void note_local_forward(std::span<const at::Tensor> outputs);
  // REQUIRES: a backward runs on this thread.
  void gradient_ready(VariableIndex variable, bool is_defined);
  void shadow();
  void set_manual_finalization(bool required);
  void finalize();
  bool replan();
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);

 private:
  friend class Reducer;  // implements its shorter methods on these members

  template <typename Work>
  auto locked(const Work& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return work();
  }

  // As locked(); also records an exception of `work` as the last error.
  template <typename Work>
  auto noting_errors(const Work& work) {
    try {
      return locked(work);
    } catch (...) {
      note_error();
      throw;
    }
  }

  // Records the current exception. REQUIRES: mutex_ is not held.
  void note_error();

  // As noting_errors(); also calls after_iteration_ if all ranks have reduced
  // an iteration, though `work` may throw if this one could not deliver it.
  void ending_iterations(const std::function<void()>& work);

  // All methods below REQUIRE: mutex_ is held, unless they say otherwise.

  // ---- During a backward. The on_...() are callbacks, and take mutex_.
  void on_output_reached(Preparation preparation);
  void on_local_output_reached();
  void on_backward_end(int64_t preparation, int backward_id);
  void report_gradient_without_forward(VariableIndex variable);
  void enter_backward(int backward_id);
  void watch_end(int backward_id);
  void begin_reduction();
  void mark_at_begin();
  void accept_gradient(VariableIndex variable, bool is_defined);
  void accept_early_gradient(VariableIndex variable, bool is_defined,
                             int backward_id);
  void mark(size_t variable, Slot slot, bool launch_if_ready = false);
  void launch_ready();
  void launch_in_scope();
  void await_used_map();
  void finish();
  void abort_iteration();

  // ---- Between iterations.
  void connect_ranks();
  void confirm_at_destruction() noexcept;
  void barrier(std::string_view action);
  void start_iteration();
  bool replan_if_due();
  // `change` returns whether the sequence has changed.
  void change_sequence(std::string_view caller,
                       const std::function<bool()>& change);
  void require_no_running_backward() const;
  void require_not_reducing(std::string_view caller) const;
  void end_unfinished_iteration();
  // Calls `collective`; if it throws, closes the group and throws PeerError.
  void call_between_iterations(std::string_view action,
                               const std::function<void()>& collective);
  // Compares `own` with all ranks' statuses. Drops the prepared iteration if
  // they differ.
  void agree(Iteration& iteration, const RankStatus& own);
  // Compares the policy's sequence across ranks, once.
  void agree_on_sequence(Iteration& iteration);

  std::shared_ptr<Iteration> make_iteration(int64_t number) const;
  IterationId iteration_id(int64_t iteration) const;
  std::string describe_missing(const Iteration& iteration) const;
  // Returns a report, once per iteration, of the parameters without gradients
  // if a backward ended `ago` or earlier and the iteration is not over; other
  // losses may follow. Empty: none.
  std::string report_missing(std::chrono::seconds ago = {});
  bool has_begun() const { return iteration_ && iteration_->has_begun(); }

  // Called by the stall watch's thread, without mutex_. Never blocks on it:
  // mutex_ is held during waits for peers.
  std::string describe_progress() const;
  void warn_of_missing_late();

  mutable std::mutex mutex_;
  // Guarded by mutex_, but for `progress`.
  Observations observations_;
  // Guarded by mutex_, but for table(), group(), and options() without the
  // hook.
  DataParallelPolicy policy_;
  // Guarded by mutex_.
  PeerStatus peers_;
  IterationEnd end_;
  std::shared_ptr<Iteration> iteration_;  // null: none is prepared
  BackwardMembership membership_;
  // The last iteration in which continuations of the hook are watched.
  int64_t watches_continuations_until_;
  std::function<void()> after_iteration_;  // may be empty
  bool finalizes_manually_ = false;
  bool expects_forwards_ = false;
  bool has_forward_ = false;  // since the last reduction
  bool has_warned_ = false;   // of a gradient without a forward

  // Callbacks of a backward share ownership while they run.
  std::shared_ptr<GradientHooks> hooks_;

  // Null: not connected, no peers, or no store.
  std::unique_ptr<StallWatch> stall_watch_;
  // Settings for a stall watch that is not made yet.
  std::optional<std::chrono::milliseconds> stall_report_after_;
  std::function<void(const std::string& report)> stall_handler_;

  mutable std::mutex error_mutex_;
  std::optional<ReductionError> last_error_;  // guarded by error_mutex_
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ENGINE_H_
