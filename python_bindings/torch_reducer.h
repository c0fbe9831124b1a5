// Adapts Reducer to the interface of torch.distributed.Reducer, whose comm
// hook, process group and static graph are set after construction.
//
// Where Reducer can't be changed it is made again, without a collective: all
// ranks change groups and declare static graphs, between iterations.
//
// Thread safety: as Reducer. The GIL must not be held by whoever waits for a
// call, since comm hooks written in Python take it.

#ifndef BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_
#define BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <unordered_set>
#include <vector>

#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/python_bindings/python_hooks.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

class TorchReducer {
 public:
  // Collective if ranks are compared, as Reducer's.
  //
  // Errors: RuntimeError where Reducer has ValueError: torch's class knows no
  // other.
  TorchReducer(std::vector<at::Tensor> parameters,
               c10::intrusive_ptr<c10d::ProcessGroup> group,
               ReducerOptions options,
               std::vector<std::vector<size_t>> first_buckets);

  void prepare_for_forward();
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);

  // Returns true if it rebuilt. Errors: RuntimeError if the last prepared
  // backward left parameters without gradients.
  bool rebuild_buckets();

  // See Reducer.
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

  // This rank has joined while the others reduce an iteration. Divides as
  // set_divisor() says.
  void shadow_iteration(bool use_world_size);

  // Before a collective of the caller's own: throws on all ranks if they are in
  // different places.
  void meet_peers();

  // Broadcasts these buffers of rank 0 before a forward with gradients, after
  // meet_peers(). Returns false if the hooks were removed. Throws as
  // Reducer::broadcast_before_forward().
  bool send_buffers(std::vector<at::Tensor> buffers);

  // Errors: RuntimeError naming the parameters whose gradients the running
  // reduction still waits for.
  void check_finalized() const;

  // `name` is for messages, `rule` for the words that programs look for in the
  // error of torch's reducer. Errors: RuntimeError naming the first hook if
  // there is one.
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook,
                          std::string name,
                          std::string_view rule =
                              "register_comm_hook or "
                              "register_builtin_comm_hook can only be called "
                              "once");
  void register_builtin_comm_hook(c10d::BuiltinCommHookType type);

  // Divides the next buckets by the world size, or by the result of `count`,
  // the number of ranks that still have data, until the next
  // prepare_for_forward(). Without effect under a registered hook.
  void set_divisor(c10::intrusive_ptr<c10d::Work> count, bool use_world_size);

  // Calls `step` with each of `parameters` whose bucket has arrived, after any
  // comm hook, while backward goes on. Afterwards they have no gradients, nor
  // before the next backward if it failed. To be called on every rank before
  // training.
  void step_in_backward(const std::vector<at::Tensor>& parameters,
                        ParameterStep step);

  // No effect if the graph is static already. Errors: RuntimeError once
  // training has begun.
  void set_static_graph();

  // From here on gradients are announced by gradient_ready() and become of the
  // parameters' dtype; a user's hook that is registered already gets buckets of
  // `dtype`, if given. To be called on every rank before training.
  void set_mixed_precision_dtype(std::optional<at::ScalarType> dtype);

  // The number of ranks that used each parameter in the last reduction: int32,
  // on the parameters' device. Undefined if the reducer does not count.
  at::Tensor used_parameter_counts();

  // False if the parameters that a graph left unused changed.
  bool is_graph_static() const;

  // Drops the iteration and the plan. The next call that needs them, or
  // set_process_group(), makes them again.
  void reset() { reducer_ = nullptr; }
  void set_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Removes the hooks from the parameters for good: gradients are local then.
  void remove_hooks();

  // Timelines are of every `rate`-th iteration. Errors: ValueError below 1.
  int64_t logging_sample_rate() const { return logging_sample_rate_; }
  void set_logging_sample_rate(int64_t rate);

  // Of the last iteration that was sampled.
  Timeline timeline() const {
    return reducer_ ? reducer_->timeline() : Timeline{};
  }

  // Of the last backward that failed.
  std::optional<ReductionError> last_error() const {
    return reducer_ ? reducer_->last_error() : std::nullopt;
  }

  // Zeros and empty lists where there is no reducer.
  ReducerStatistics statistics() const {
    return reducer_ ? reducer_->statistics() : ReducerStatistics{};
  }
  int64_t buckets_reduced() const {  // since the last prepare_for_backward()
    return statistics().buckets_launched - launched_before_;
  }
  std::vector<std::vector<size_t>> buckets() const;

  const std::vector<std::string>& parameter_names() const { return names_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

 private:
  void make();
  void make_ordered();
  void divide_by_count(bool has_data);
  bool ready();  // makes a reducer after a reset
  std::shared_ptr<c10d::CommHookInterface> with_steps(
      std::shared_ptr<c10d::CommHookInterface> hook) const;
  void drop_gradients_of_failed_steps();
  std::vector<size_t> missing_gradients() const;
  void check_last_backward();

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;  // by parameter, or empty
  const std::vector<std::vector<size_t>> first_buckets_;  // see Reducer
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ReducerOptions options_;  // but for names
  int64_t logging_sample_rate_ = 100;
  std::optional<std::chrono::milliseconds> stall_report_after_;  // else default
  bool watches_gradients_ = true;
  bool finalizes_manually_ = false;
  bool expects_forwards_ = false;
  std::string hook_name_;  // empty: none was registered
  std::optional<c10d::BuiltinCommHookType> built_in_;  // the hook is this one
  std::shared_ptr<OrderedAllReduce> ordered_;          // null: not reproducible
  std::shared_ptr<AveragingHook> averaging_;
  ParameterStep step_;  // empty: optimizers step after backward
  std::unordered_set<const c10::TensorImpl*> stepped_;
  int64_t failures_dropped_ = 0;  // iterations aborted, whose gradients went
  int64_t launched_before_ = 0;   // buckets, by earlier iterations
  bool hooks_removed_ = false;
  std::unique_ptr<Reducer> reducer_;  // null after reset() or remove_hooks()
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_
