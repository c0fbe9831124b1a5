// A Reducer with the habits of torch.distributed.Reducer.
//
// torch's class is told about its comm hook, its process group and a static
// graph after construction, and is asked for what it did; Reducer is not. What
// only that surface needs is here. Everything about gradients is Reducer's.
//
// Where Reducer can't be changed it is made anew, without a collective: ranks
// change groups and declare static graphs alike, between iterations.
//
// Thread safety: as Reducer. The GIL must not be held by whoever waits for a
// call, since comm hooks written in Python take it.

#ifndef BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_
#define BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <unordered_set>
#include <vector>

#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/ordered_all_reduce.h"
#include "brigade/comm_hooks/step_in_backward.h"
#include "brigade/python_bindings/awaited_futures.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

class TorchReducer {
 public:
  // Collective if ranks are compared, as Reducer's. Unset `rebuild_buckets`:
  // buckets are rebuilt unless unused parameters are searched for.
  //
  // Errors: RuntimeError where Reducer has ValueError: torch's class knows no
  // other.
  TorchReducer(std::vector<at::Tensor> parameters,
               c10::intrusive_ptr<c10d::ProcessGroup> group,
               ReducerOptions options);

  // Called before forward.
  void prepare_for_forward();
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  void note_local_forward(const std::vector<at::Tensor>& outputs);

  // Returns true if it rebuilt. Errors: RuntimeError if the last prepared
  // backward left parameters without gradients.
  bool rebuild_buckets();

  // This rank has joined while the others reduce an iteration. What they divide
  // by: as in set_divisor().
  void shadow_iteration(bool use_world_size);

  // See Reducer.
  bool can_continue() const { return !reducer_ || reducer_->can_continue(); }
  void abort_group() {
    if (reducer_) reducer_->abort_group();
  }

  // See Reducer.
  void await_statuses();

  // Before a collective of the caller's own: throws on all ranks if they are in
  // different places.
  void meet_peers();

  // Broadcasts these buffers of rank 0 before a forward with gradients, after
  // meet_peers(). Returns false if there is no reducer any more. Throws as
  // Reducer::broadcast_before_forward().
  bool send_buffers(std::vector<at::Tensor> buffers);

  // Errors: RuntimeError naming the parameters whose gradients the running
  // reduction still waits for.
  void check_finalized() const;

  // `name` is for messages. Errors: RuntimeError naming the first hook if there
  // is one.
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook,
                          std::string name);
  void register_builtin_comm_hook(c10d::BuiltinCommHookType type);

  // What the next buckets are divided by: the world size, or the sum that
  // `count` of the ranks that still have data ends with. Holds until the next
  // prepare_for_forward(). Without effect under a registered hook.
  void set_divisor(c10::intrusive_ptr<c10d::Work> count, bool use_world_size);

  // Behind whatever hook there is or will be, `step` is called with each of
  // `parameters` whose bucket has arrived, while backward goes on; they have no
  // gradients after it, nor before the next one if it failed. To be called on
  // every rank before training.
  void step_in_backward(const std::vector<at::Tensor>& parameters,
                        ParameterStep step);

  // The next backward does not end before these are done.
  void await_at_end(std::vector<AwaitedFutures::Future> futures);

  // No effect if the graph is static already. Errors: RuntimeError once
  // training has begun.
  void set_static_graph();

  // From here on gradients are told by gradient_ready(), and may be of another
  // dtype than the parameters are now, which is what they become; a hook of the
  // user's that is registered already gets buckets of `dtype`, if given. To be
  // called on every rank before training.
  void set_mixed_precision_dtype(std::optional<at::ScalarType> dtype);
  void gradient_ready(size_t parameter);

  // See Reducer.
  void set_manual_finalization(bool required);
  bool must_finalize_after_backward() const;
  void finalize_backward();

  // How many ranks used each parameter in the last reduction: int32, where the
  // parameters are. Undefined unless the reducer wants to know.
  at::Tensor used_parameter_counts();

  // False if the parameters that a graph left unused changed.
  bool is_graph_static() const;

  // Sums any bucket over the group, as hooks of torch's do.
  c10::intrusive_ptr<c10::ivalue::Future> run_all_reduce_hook(
      c10d::GradBucket& bucket);

  // Forgets the iteration and the plan. The next call that needs them, or
  // set_process_group(), makes them anew.
  void reset() { reducer_ = nullptr; }
  void set_process_group(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Takes the hooks off the parameters for good: from here on gradients are
  // local.
  void remove_hooks();

  // Timelines are of every `rate`-th iteration. Errors: ValueError below 1.
  int64_t logging_sample_rate() const { return logging_sample_rate_; }
  void set_logging_sample_rate(int64_t rate);

  // See Reducer.
  void set_stall_report_after(std::chrono::milliseconds time);

  // Of the last iteration that was sampled.
  Timeline timeline() const;

  // By parameter, ns from the begin of that backward to its gradient; 0: none
  // came.
  std::vector<int64_t> gradient_times_ns() const;

  // What the last call or backward that failed said.
  std::optional<ReductionError> last_error() const;

  // Zeros and empty lists where there is no reducer.
  ReducerStatistics statistics() const;
  int64_t buckets_reduced() const;  // since the last prepare_for_backward()
  std::vector<std::vector<size_t>> buckets() const;
  std::vector<int64_t> bucket_sizes_bytes(
      std::span<const int64_t> parameter_sizes_bytes) const;

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<std::string>& parameter_names() const { return names_; }
  const ReducerOptions& options() const { return options_; }
  c10d::ProcessGroup& group() const { return *group_; }

 private:
  void make();
  void make_ordered();
  void divide_by_count(bool has_data);
  bool ready();  // makes a reducer after a reset
  std::shared_ptr<c10d::CommHookInterface> with_steps(
      std::shared_ptr<c10d::CommHookInterface> hook) const;
  void drop_gradients_of_failed_steps();
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook,
                          std::string name, std::string_view rule);
  std::vector<size_t> missing_gradients() const;
  void check_last_backward();
  void remember_errors(const std::function<void()>& call);

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;  // by parameter, or empty
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ReducerOptions options_;  // but for names
  int64_t logging_sample_rate_ = 100;
  std::optional<std::chrono::milliseconds> stall_report_after_;  // else default
  bool watches_gradients_ = true;
  bool finalizes_manually_ = false;
  std::string hook_name_;  // empty: none was registered
  std::optional<c10d::BuiltinCommHookType> built_in_;  // the hook is this one
  std::optional<ReductionError> last_error_;           // of a call
  std::shared_ptr<OrderedAllReduce> ordered_;          // null: not reproducible
  std::shared_ptr<AveragingHook> averaging_;
  ParameterStep step_;  // empty: optimizers step after backward
  std::unordered_set<const c10::TensorImpl*> stepped_;
  int64_t failures_dropped_ = 0;  // iterations aborted, whose gradients went
  std::shared_ptr<AwaitedFutures> awaited_;
  int64_t launched_before_ = 0;  // buckets, by earlier iterations
  bool hooks_removed_ = false;
  std::unique_ptr<Reducer> reducer_;  // null after reset() or remove_hooks()
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_TORCH_REDUCER_H_
