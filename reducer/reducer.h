// Averaging of gradients over the ranks of a process group during backward.
//
// A reducer watches the gradients of its parameters. When all gradients of a
// bucket are ready, it packs them into one buffer and launches a collective on
// it. When backward returns, every `.grad` holds the average over all ranks.
// ddp/ wraps a module with a reducer.
//
//   Reducer reducer(parameters, group);
//   for (auto& [input, target] : batches) {
//     optimizer.zero_grad();
//     at::Tensor output = net->forward(input);
//     reducer.prepare_for_backward(output);
//     loss(output, target).backward();
//     optimizer.step();
//   }
//
// A backward without prepare_for_backward() before it accumulates gradients on
// this rank; the next prepared backward reduces the sum.
//
// Move and cast parameters before construction. With gradient_as_bucket_view a
// tensor taken from `.grad` changes in the next step. An exception in one
// rank's backward is an error on all ranks (docs/internals.md).
//
// Thread safety: any thread may call a method, one at a time; gradients may
// become ready on several threads at once.

#ifndef BRIGADE_REDUCER_REDUCER_H_
#define BRIGADE_REDUCER_REDUCER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "brigade/hooks/nested_tensors.h"
#include "brigade/observing/timeline.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/reducer_options.h"

namespace brigade {

class AutoPlan;
class Engine;

class Reducer {
 public:
  // Collective, unless verify_across_ranks is false: every rank of `group`
  // passes the same parameters (number, names, shapes, strides, dtypes) and
  // options. Parameters keep their values. Shares ownership of the group.
  //
  // `first_buckets`: the buckets until a rebuild, if options.bucket_plan is
  // empty. Empty: planned by size.
  //
  // Errors: ValueError, on all ranks, if a parameter does not require a
  // gradient, is not a leaf, is sparse, is listed twice, or is on a device
  // without a backend in the group; the number of names or sparse flags is
  // wrong; a cap is <= 0; the plan misses or repeats a parameter, or mixes
  // dtypes, devices, or sparse and dense gradients in a bucket; `reproducible`
  // is set with a sparse gradient or another comm hook; or ranks differ. On
  // this rank alone if `group` is null or verify_across_ranks is false.
  // DistBackendError if a peer has died or the timeout passes.
  Reducer(std::vector<at::Tensor> parameters,
          c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options = {},
          const std::vector<std::vector<size_t>>& first_buckets = {});

  // For local replicas of a module, the same number on every rank: replicas[r]
  // lists the parameters of replica r. An iteration is a forward of each, one
  // prepare_for_backward(), and one backward. All get the average over all.
  Reducer(std::vector<std::vector<at::Tensor>> replicas,
          c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options = {},
          const std::vector<std::vector<size_t>>& first_buckets = {});

  // On devices awaits outstanding statuses (max_unconfirmed_iterations) for 5 s
  // and prints a failure to stderr. Does not wait for collectives in flight.
  // Gradients that are views of buckets stay valid. REQUIRES: no backward
  // through the parameters runs.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // ---- An iteration

  // Prepares the next backward to be reduced. `outputs`: of the forward; any
  // nest of tensors. Every rank runs the same number of prepared backwards. May
  // be called again without a backward in between. Several backwards may share
  // one call, if each parameter gets its gradient once; the reduction ends with
  // the last of them.
  //
  // Errors: RuntimeError if the previous backward left parameters without
  // gradients or was not finalized, or a parameter was moved, cast or resized;
  // on all ranks if plans differ. DistBackendError if a peer fails.
  template <typename Outputs>
  void prepare_for_backward(const Outputs& outputs) {
    prepare(tensors_of(outputs));
  }

  // Excludes a forward from reduction: a backward through its outputs
  // accumulates gradients on this rank. From here on so does a backward that
  // reaches no output of prepare_for_backward(), if those have a grad_fn.
  void note_local_forward(const std::vector<at::Tensor>& outputs);

  // For wrappers whose forwards all call one of the two methods above: a
  // gradient without such a call is a warning, or with one_backward_per_forward
  // an error.
  void expect_forwards();

  // For a rank without data: launches the collectives of the peers' iteration
  // on zeros, and drops the results. Gradients stay; marks of used parameters
  // are lost. Errors: those of prepare_for_backward() and of a backward.
  void shadow_iteration();

  // Fails an iteration that has begun and is not complete: RuntimeError for
  // missing gradients or finalize_backward(), not after a backward that threw.
  void end_iteration();

  // ---- Between iterations

  // Blocks until all ranks call it, and checks that all pass the same `action`
  // ("came to a forward"). For use before a collective that a rank might miss
  // after an exception. No-op if all buckets are on devices. Throws on all
  // ranks: RuntimeError if they differ, DistBackendError if one has failed.
  void barrier(std::string_view action);

  // Broadcasts buffers from rank `source` before a forward. Collective. Throws
  // as barrier() and await_statuses(); DistBackendError if the broadcast fails,
  // and can_continue() is false then.
  void broadcast_before_forward(std::vector<at::Tensor> tensors, int source);

  // Awaits the statuses of all iterations so far; call it before you save a
  // checkpoint. Throws DistBackendError if an iteration has failed.
  void await_statuses();

  // Rebuilds the plan if the next prepare_for_backward() would; collective
  // then. Returns whether it did. Throws as prepare_for_backward().
  bool rebuild_buckets();

  // Sets the hook that reduces buckets from the next iteration on; null: the
  // default. Collective. Errors: ValueError with `reproducible` unless the hook
  // sums in rank order; RuntimeError during an iteration, and on all ranks if
  // the hooks differ in name or wire dtype; DistBackendError if a peer fails.
  // After the last two the hook stays set.
  void set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  std::shared_ptr<const c10d::CommHookInterface> comm_hook() const;

  // True if the hook steps an optimizer (step_in_backward()).
  bool hook_steps_parameters() const;

  // Sets the buckets from the next iteration on. Collective. Errors: ValueError
  // on this rank for an invalid plan; RuntimeError during an iteration, and on
  // all ranks if plans differ.
  void set_bucket_plan(std::vector<std::vector<size_t>> buckets);
  BucketPlan plan() const;

  // ---- Manual readiness and finalization

  // Removes the gradient hooks: the caller calls gradient_ready() instead. For
  // parameters whose data is replaced around each forward (mixed precision).
  // Gradients are cast to the dtype of construction. Errors: ValueError with
  // find_unused_parameters; RuntimeError during an iteration.
  void stop_watching_gradients();

  // Marks a gradient of the running backward, in `.grad`, as ready. Errors:
  // RuntimeError if gradients are watched, or no backward runs; ValueError if
  // there is no such parameter; those of a watched gradient.
  void gradient_ready(size_t parameter, size_t replica = 0);

  // If set, an iteration ends in finalize_backward(), and other work can
  // overlap the last collectives. Equal on all ranks. Errors: RuntimeError
  // between a forward and the end of its iteration.
  void set_manual_finalization(bool required);

  // Returns true while the order of gradients or a static graph is learned:
  // then finalize_backward() must be called after backward, and not during it.
  bool must_finalize_after_backward() const;

  // Awaits the collectives of the iteration, and delivers. RuntimeError without
  // set_manual_finalization(), if there is nothing to finalize, or if gradients
  // are missing; errors of the end of a backward.
  void finalize_backward();

  // ---- Failures

  // Returns false once the group is closed. Training then needs a new group and
  // a new reducer.
  bool can_continue() const;

  // Closes the group after a collective of the caller has failed.
  void abort_group();

  std::optional<ReductionError> last_error() const;

  // ---- Observation

  // The parameters whose gradients the iteration waits for, ascending.
  std::vector<size_t> missing_gradients() const;

  ReducerStatistics statistics() const;
  void forward_begins();  // recorded in the timeline

  // Returns the timeline of the last iteration that was sampled and reduced.
  // Waits for the streams of devices.
  Timeline timeline() const;

  // Samples the first 10 iterations, and then each multiple of `sample_rate`
  // (100); 0: none. Returns the previous rate. Errors: ValueError if negative.
  int64_t set_timeline_sample_rate(int64_t sample_rate);

  // Sets the waiting time after which a rank warns and names late ranks
  // (docs/guides/timelines.md). Default: half of the group's timeout, at most
  // 60 s. 0: never. Errors: ValueError if it is negative.
  void set_stall_report_after(std::chrono::milliseconds time);

  // Sets a function that receives the text instead of a warning; null: warn. On
  // another thread; may call only last_error() and these two methods.
  void set_stall_handler(
      std::function<void(const std::string& report)> handler);

  // Returns, for each parameter, the number of replicas on all ranks that had a
  // gradient in the last reduction (of a static graph: the first): int32,
  // [num_parameters], on the CPU; zeros before. Undefined without
  // find_unused_parameters and static_graph. Waits for the all-reduce, and
  // throws its errors.
  at::Tensor used_parameter_counts();

  // With static_graph: true if all iterations left the same parameters unused.
  bool is_graph_static() const;

 private:
  friend class AutoPlan;

  // Calls `function` on all ranks when all have reduced an iteration, at the
  // end of its backward; it may be collective.
  void call_after_iterations(std::function<void()> function);
  void prepare(const std::vector<at::Tensor>& outputs);

  const std::unique_ptr<Engine> engine_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_H_
