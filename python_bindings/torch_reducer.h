// TorchReducer: adapter of Reducer to the interface of
// torch.distributed.Reducer, where the comm hook, process group and static
// graph are set after construction.
//
// A change that Reducer does not support makes a new Reducer, without
// collectives. All ranks make the same changes, between iterations.
//
// Thread safety: as Reducer. A thread that waits for a call must not hold the
// GIL, since comm hooks written in Python acquire it.

#ifndef BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_
#define BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <unordered_set>
#include <vector>

#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/python_bindings/python_hooks.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

class TorchReducer {
 public:
  // Collective if options.verify_across_ranks. Errors: as Reducer's
  // constructor, but RuntimeError instead of ValueError, as torch's.
  TorchReducer(std::vector<at::Tensor> parameters,
               c10::intrusive_ptr<c10d::ProcessGroup> group,
               ReducerOptions options,
               std::vector<std::vector<size_t>> first_buckets);

  void prepare_for_forward();
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  // Returns true if buckets were rebuilt. Errors: RuntimeError if the last
  // prepared backward left parameters without gradients.
  bool rebuild_buckets();

  // Plans buckets for the model and its links (reducer/auto_plan.h) in
  // rebuild_buckets(). Call it on all ranks before training.
  void plan_automatically();

  void note_local_forward(const std::vector<at::Tensor>& outputs);
  void expect_forwards();
  bool can_continue() const { return !reducer_ || reducer_->can_continue(); }
  void abort_group() {
    if (reducer_) reducer_->abort_group();
  }
  void await_statuses() {
    if (reducer_) reducer_->await_statuses();
  }
  void gradient_ready(size_t parameter) {
    if (reducer_) reducer_->gradient_ready(parameter);
  }
  void set_manual_finalization(bool required);
  bool must_finalize_after_backward() const;
  void finalize_backward();
  void set_stall_report_after(std::chrono::milliseconds time);

  // Takes part in an iteration of the other ranks after this rank has joined.
  // For `use_world_size`, see set_divisor().
  void shadow_iteration(bool use_world_size);

  // Checks that all ranks are at the same point before a collective of the
  // caller. Errors: as Reducer::barrier(), on all ranks.
  void meet_peers();

  // Broadcasts rank 0's buffers before a forward with gradients. Returns false
  // after remove_hooks(). Errors: as Reducer::broadcast_before_forward().
  bool send_buffers(std::vector<at::Tensor> buffers);

  // Errors: RuntimeError if the reduction still waits for gradients; it names
  // the parameters.
  void check_finalized() const;

  // `name` names the hook in errors. Errors: RuntimeError if a hook is
  // registered already.
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook,
                          std::string name);
  void register_builtin_comm_hook(c10d::BuiltinCommHookType type);

  // Until the next prepare_for_forward(), divides gradients by the world size,
  // or by the result of `count`, the number of ranks that still have data.
  // Without effect if a hook is registered.
  void set_divisor(c10::intrusive_ptr<c10d::Work> count, bool use_world_size);

  // Calls `step` with each of `parameters` during backward, when its bucket is
  // complete and after any comm hook, then drops its gradient. After a failed
  // backward, the next prepare call drops all of their gradients. Call it on
  // all ranks before training.
  void step_in_backward(const std::vector<at::Tensor>& parameters,
                        ParameterStep step);

  // No effect if the graph is static already. Errors: RuntimeError after the
  // first iteration.
  void set_static_graph();

  // Switches to manual readiness, gradient_ready(). A registered hook of the
  // user gets buckets of `dtype`, if given; gradients get the parameters'
  // dtype. Call it on all ranks before training.
  void set_mixed_precision_dtype(std::optional<at::ScalarType> dtype);

  // Returns the number of ranks that used each parameter in the last reduction,
  // int32 on the parameters' device; undefined without find_unused_parameters
  // or static_graph.
  at::Tensor used_parameter_counts();

  // Returns false if the set of unused parameters has changed.
  bool is_graph_static() const;

  // Destroys the Reducer, its iteration and plan. The next call that needs one
  // makes it.
  void reset() { reducer_ = nullptr; }
  void set_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Removes the hooks from the parameters permanently: gradients stay local.
  void remove_hooks();

  // Every `rate`-th iteration has a timeline. Errors: ValueError below 1.
  int64_t logging_sample_rate() const { return logging_sample_rate_; }
  void set_logging_sample_rate(int64_t rate);

  Timeline timeline() const {
    return reducer_ ? reducer_->timeline() : Timeline{};
  }

  std::optional<ReductionError> last_error() const {
    return reducer_ ? reducer_->last_error() : std::nullopt;
  }

  // Zeros and empty lists after reset() or remove_hooks().
  ReducerStatistics statistics() const {
    return reducer_ ? reducer_->statistics() : ReducerStatistics{};
  }
  int64_t buckets_reduced() const {  // since the last prepare_for_backward()
    return statistics().buckets_launched - launched_before_;
  }
  std::vector<std::vector<size_t>> buckets() const;

  const std::vector<std::string>& parameter_names() const {
    return options_.parameter_names;
  }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

 private:
  void make();
  void attach_auto_plan();
  void divide_by_count(bool has_data);
  bool ready();  // makes a Reducer if needed; false after remove_hooks()
  std::shared_ptr<c10d::CommHookInterface> with_steps(
      std::shared_ptr<c10d::CommHookInterface> hook) const;
  void drop_gradients_of_failed_steps();
  std::vector<size_t> missing_gradients() const;
  void check_last_backward();

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::vector<size_t>> first_buckets_;  // see Reducer
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ReducerOptions options_;
  int64_t logging_sample_rate_ = 100;
  std::optional<std::chrono::milliseconds> stall_report_after_;  // else default
  bool watches_gradients_ = true;
  bool finalizes_manually_ = false;
  bool expects_forwards_ = false;
  std::string hook_name_;  // empty: no hook is registered
  std::optional<c10d::BuiltinCommHookType> built_in_;  // registered built-in
  std::shared_ptr<OrderedAllReduce> ordered_;          // null: not reproducible
  std::shared_ptr<AveragingHook> averaging_;
  ParameterStep step_;  // empty: optimizers step after backward
  std::unordered_set<const c10::TensorImpl*> stepped_;
  int64_t failures_dropped_ = 0;  // aborted iterations with dropped gradients
  int64_t launched_before_ = 0;   // buckets of earlier iterations
  bool hooks_removed_ = false;
  bool plans_automatically_ = false;
  std::unique_ptr<Reducer> reducer_;  // null after reset() or remove_hooks()
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_
