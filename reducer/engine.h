// The engine of a Reducer: brings the gradients of an iteration to its
// collectives, launches those in one agreed order, and ends the iteration on
// all ranks (iteration_end.h): delivered on all of them, or an error on all.
//
// Buckets and used parameters are DataParallelPolicy's. The engine knows the
// phases of an iteration and which backward belongs to it. docs/protocol.md
// says when each collective is launched, and the consequences of a failure.
//
// Thread safety: any thread, one call at a time; gradients on several threads
// at once. Order of locks: the engine's, then Python's GIL, then a future's or
// a store's own. The stall watch only tries the engine's.

#ifndef BRIGADE_REDUCER_ENGINE_H_
#define BRIGADE_REDUCER_ENGINE_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include "brigade/hooks/autograd_hooks.h"
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

  // These have the contract and the errors of Reducer's methods.
  void prepare(std::span<const at::Tensor> outputs);
  void note_local_forward(std::span<const at::Tensor> outputs);
  // `is_defined`: false if no gradient will come. REQUIRES: inside of a
  // backward.
  void gradient_ready(VariableIndex variable, bool is_defined);
  void shadow();
  void set_manual_finalization(bool required);
  void finalize();
  bool replan();
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);

 private:
  friend class Reducer;  // whose other methods are a few lines each

  template <typename Work>
  auto locked(const Work& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return work();
  }

  // Under the lock, too; notes an exception of `work` as the last error.
  template <typename Work>
  auto noting_errors(const Work& work) {
    try {
      return locked(work);
    } catch (...) {
      observations_.note_error();
      throw;
    }
  }

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
  // But for its constants: table, group, and options except for the hook.
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
