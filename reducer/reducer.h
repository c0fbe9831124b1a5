// Averages gradients over the ranks of a group while backward is still running.
//
// A reducer watches the gradients of its parameters. When all gradients of a
// bucket are there, it packs them into one buffer and launches a collective on
// it; when backward returns, every `.grad` holds the average over all ranks.
// It does not know modules, optimizers or data: ddp/ wraps a module.
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
// this rank only; the next prepared one reduces the sum.
//
// Move and cast parameters before a reducer is made of them. A tensor taken
// from `.grad` changes with the next step while gradients are views. An
// exception in one rank's backward is an error on all; docs/protocol.md says
// when each collective is launched, and the consequences of a failure.
//
// Thread safety: methods may be called from any thread, one at a time;
// gradients may arrive on several threads at once.

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

class Engine;

class Reducer {
 public:
  // Collective, unless verify_across_ranks is false: every rank of `group`
  // constructs its reducer with the same parameters (number, names, shapes,
  // strides, dtypes) and options. Parameters keep their values. Keeps the group
  // alive.
  //
  // Errors: ValueError, on every rank alike, if a parameter does not require a
  // gradient, is not a leaf, is sparse, is listed twice or is on a device that
  // the group does not serve; names or sparse flags are not one per parameter;
  // a cap is <= 0; the plan misses or repeats a parameter, or mixes dtypes,
  // devices or sparse and dense gradients in a bucket; `reproducible` can't be
  // had; or ranks differ. On this rank alone if `group` is null, or if it does
  // not verify across ranks. DistBackendError if a peer has died or does not
  // come in time.
  //
  // `first_buckets`: without a plan, those until a rebuild; empty: by size.
  Reducer(std::vector<at::Tensor> parameters,
          c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options = {},
          const std::vector<std::vector<size_t>>& first_buckets = {});

  // The same for local replicas of a module, as many on every rank: replicas[r]
  // lists the parameters of replica r. An iteration is a forward of each, one
  // prepare_for_backward() on all outputs and one backward; every replica gets
  // the average over all. One collective runs per bucket.
  Reducer(std::vector<std::vector<at::Tensor>> replicas,
          c10::intrusive_ptr<c10d::ProcessGroup> group,
          ReducerOptions options = {},
          const std::vector<std::vector<size_t>>& first_buckets = {});

  // Does not wait for collectives in flight. Gradients that are views of
  // buckets stay valid. REQUIRES: no backward through the parameters runs.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // ---- An iteration

  // The next backward will be reduced. Call it on the outputs of forward, any
  // nest of tensors, on every rank the same number of times. May be called
  // again without a backward in between. Several backwards may share one
  // preparation, as long as each parameter gets its gradient once; the
  // reduction ends with the last of them.
  //
  // Errors: RuntimeError if the last prepared backward left parameters without
  // gradients, or was not finalized; if a parameter was moved, cast or resized;
  // or, on all ranks, if plans differ. DistBackendError if a peer fails.
  template <typename Outputs>
  void prepare_for_backward(const Outputs& outputs) {
    prepare(tensors_of(outputs));
  }

  // A forward has run whose gradients are this rank's: a backward through its
  // outputs is not reduced, nor is one from here on that goes through none that
  // prepare_for_backward() was given, if these have a history.
  void note_local_forward(const std::vector<at::Tensor>& outputs);

  // For wrappers, whose forwards all end in one of the two above. From here on
  // a gradient without either since the last reduction (the program called the
  // wrapped module itself) gets a warning, once; with one_backward_per_forward
  // backward throws RuntimeError.
  void expect_forwards();

  // For a rank that has run out of data: launches what peers launch in their
  // iteration, on zeros, and delivers nothing. Gradients here stay as they are;
  // marks of used parameters are lost. Errors: as prepare_for_backward(), and
  // those of the peers' backward.
  void shadow_iteration();

  // The iteration that has begun, if any, gets no more gradients: ends it and
  // tells the peers. Errors: RuntimeError naming the missing gradients, or if
  // finalize_backward() should have been called. None if backward has thrown.
  void end_iteration();

  // ---- Between iterations

  // Compares with all ranks that each is about to do `deed`, such as "came to a
  // forward": before a collective that a rank might miss after an exception.
  // Collective; does nothing where all buckets are on devices. Throws on all
  // ranks: RuntimeError if they differ, DistBackendError if one has failed.
  void meet_peers(std::string_view deed);

  // Broadcasts buffers of rank `source` before a forward. Collective. Throws as
  // meet_peers() and await_statuses(); DistBackendError if the broadcast fails,
  // and can_continue() is false then.
  void broadcast_before_forward(std::vector<at::Tensor> tensors, int source);

  // Blocks until all ranks are known to have ended the iterations so far
  // (max_unconfirmed_iterations). Call it before a checkpoint is saved. Throws
  // DistBackendError if one has failed: its gradients were not averaged.
  void await_statuses();

  // Rebuilds the plan now, if prepare_for_backward() would. Collective then.
  // Returns whether it did. Errors: as prepare_for_backward().
  bool rebuild_buckets();

  // From the next iteration on, buckets travel by this hook; null: the default.
  // Collective. Errors: ValueError with `reproducible` unless it sums in order;
  // RuntimeError in an iteration, and on all ranks if they differ in the hook's
  // name or wire dtype; DistBackendError if a peer fails. The hook stays set
  // after the last two.
  void set_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  std::shared_ptr<const c10d::CommHookInterface> comm_hook() const;

  // The hook updates parameters while backward runs (step_in_backward()).
  bool hook_steps_parameters() const;

  // Parameters by bucket, in launch order. Changes once, when it is rebuilt.
  BucketPlan plan() const;

  // ---- Manual readiness and finalization

  // From here on the caller tells when a gradient is ready: for parameters
  // whose data is swapped around each forward, say for a lower precision. Their
  // gradients are cast to the dtype of construction. Errors: ValueError with
  // find_unused_parameters; RuntimeError in the middle of an iteration.
  void stop_watching_gradients();

  // `.grad` of a parameter holds its gradient of the running backward. Errors:
  // RuntimeError if the reducer watches gradients itself, or no backward runs;
  // ValueError if there is no such parameter; those of a watched gradient.
  void gradient_ready(size_t parameter, size_t replica = 0);

  // While set, on all ranks alike, an iteration ends in finalize_backward():
  // for work that is to overlap with the last collectives. Errors: RuntimeError
  // between a forward and the end of its iteration.
  void set_manual_finalization(bool required);

  // True while the order of gradients is observed or a static graph is learnt:
  // finalize_backward() must be called after backward then, and not in it.
  bool must_finalize_after_backward() const;

  // Waits for the collectives of the iteration, and delivers. Errors:
  // RuntimeError if it is not to be called, there is nothing to finalize, or
  // gradients are missing; those of the end of a backward.
  void finalize_backward();

  // ---- Failures

  // False once the group is closed: after a peer has died, left or not
  // answered. A new group is needed then, and a new reducer on it.
  bool can_continue() const;

  // Closes the group after the network failed in a collective of the caller's.
  void abort_group();

  // The text and time of the last method or backward that failed.
  std::optional<ReductionError> last_error() const;

  // ---- Observation

  // Parameters whose gradients the iteration waits for, ascending.
  std::vector<size_t> missing_gradients() const;

  ReducerStatistics statistics() const;

  // Forward begins: for the timeline, which has no forward otherwise.
  void forward_begins();

  // Of the last iteration that was sampled and reduced to the end. With buckets
  // on devices with streams, waits for these.
  Timeline timeline() const;

  // Samples the first 10 iterations, and then every multiple of this (default
  // 100); 0: none. Errors: ValueError if it is negative.
  void set_timeline_sample_rate(int64_t sample_rate);

  // A rank that has waited so long for its peers warns, naming the late ranks
  // (docs/timeline.md). Default: half of the group's timeout, at most 60 s. 0:
  // never. Errors: ValueError if negative.
  void set_stall_report_after(std::chrono::milliseconds time);

  // Gets the text of that warning instead; null: warn again. Called on another
  // thread, while the reducer's lock is held: it may call only last_error() and
  // these two. Its exceptions are dropped. The destructor waits for it.
  void set_stall_handler(
      std::function<void(const std::string& report)> handler);

  // The number of replicas of all ranks that had a gradient of each parameter
  // in the last reduction (of a static graph: the first): int32,
  // [num_parameters], on the CPU; zeros before. Undefined unless unused
  // parameters are looked for or the graph is static. Waits for the sum.
  // Errors: those of the collective.
  at::Tensor used_parameter_counts();

  // The graph is declared static, or all iterations so far left the same
  // parameters unused: static_graph would save the search.
  bool is_graph_static() const;

 private:
  void prepare(const std::vector<at::Tensor>& outputs);

  const std::unique_ptr<Engine> engine_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_REDUCER_H_
