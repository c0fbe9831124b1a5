// Policy of data parallelism for the engine: the buckets and the order of their
// collectives, the gradients that will not arrive, and new bucket plans in the
// order of gradients that the first iterations show.
// Variables are given by their number in the ParameterTable.
//
// Thread safety: none; the engine's lock covers all but table().

#ifndef BRIGADE_REDUCER_DATA_PARALLEL_POLICY_H_
#define BRIGADE_REDUCER_DATA_PARALLEL_POLICY_H_

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unordered_map>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/hooks/autograd_hooks.h"
#include "brigade/hooks/graph_search.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/bucket.h"
#include "brigade/reducer/bucket_replica.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/used_parameters.h"

namespace torch::distributed::autograd {
class DistAutogradContext;
}  // namespace torch::distributed::autograd

namespace brigade {

class HostSums;

// ---- The graph, learned in the first iterations.

// The order in which gradients become ready: observed once, taken from rank 0,
// and adopted by a new plan.
class ReadyOrder {
 public:
  // Observes the last of the first `iterations`; 0: none.
  explicit ReadyOrder(int64_t iterations)
      : iterations_left_(iterations),
        stage_(iterations > 0 ? Stage::kObserving : Stage::kFrozen) {}

  // Starts an iteration: drops the notes of an aborted one.
  void restart() {
    if (is_observing()) order_.clear();
  }

  // The parameter's gradient is ready. No-op once an order is observed.
  void note(size_t parameter) {
    if (is_observing()) order_.push_back(parameter);
  }

  // Ends an iteration that all ranks have ended well.
  void observe() {
    if (is_observing() && --iterations_left_ == 0) stage_ = Stage::kObserved;
  }

  // Returns true until an order is observed.
  bool is_observing() const { return stage_ == Stage::kObserving; }

  // Returns true from the observation until freeze().
  bool is_pending() const {
    return stage_ == Stage::kObserved || stage_ == Stage::kAgreed;
  }

  // Broadcasts rank 0's order, once. Collective. REQUIRES: is_pending(). Throws
  // the broadcast's errors; a later call tries again.
  void agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::vector<size_t>& order() const { return order_; }

  // Drops the order, and observes no more.
  void freeze() {
    order_.clear();
    stage_ = Stage::kFrozen;
  }

 private:
  enum class Stage { kObserving, kObserved, kAgreed, kFrozen };

  int64_t iterations_left_;
  Stage stage_;
  std::vector<size_t> order_;
};

// Number of runs of each gradient hook in an iteration of a static graph.
//
// A parameter that reentrant checkpoints or shared weights use several times
// gets its gradient in several parts, and its hook runs for each. The first
// iteration counts the runs. Later a gradient is ready at its last run.
// Variables are identified by number.
class HookCounts {
 public:
  explicit HookCounts(size_t num_variables);

  // Returns true until freeze().
  bool is_learning() const { return stage_ <= Stage::kLearningAlone; }

  // Returns true if all ranks learn in this iteration.
  bool are_all_learning() const { return stage_ == Stage::kLearning; }

  // Starts an iteration: drops the counts of an unfinished one.
  void restart();

  // Counts a run of the variable's hook. Returns true for its last run in the
  // iteration; false while learning. REQUIRES: that run has not been counted.
  bool count_run(size_t variable);

  // Keeps the counts at the end of the first backward. Returns the variables
  // whose hooks ran, in the order of their last runs. REQUIRES: is_learning().
  std::vector<size_t> freeze();

  // The iteration has ended well on all ranks. A rank without counts took part
  // as a shadow, and learns alone in its first iteration of its own.
  void confirm();

  // The iteration was aborted on all ranks: counts again in the next one.
  void abort();

  // Returns the variables whose hooks never run, ascending. REQUIRES:
  // !is_learning().
  const std::vector<size_t>& silent() const { return silent_; }

  // Returns true if the variable's hook is known never to run.
  bool is_silent(size_t variable) const {
    return !is_learning() && expected_[variable] == 0;
  }

 private:
  enum class Stage {
    kLearning,       // with all ranks
    kLearningAlone,  // the other ranks have counted already
    kCounted,        // in this iteration, which may still be aborted
    kKnown,
  };

  Stage stage_ = Stage::kLearning;
  std::vector<uint32_t> counts_;    // by variable, in this iteration
  std::vector<uint32_t> expected_;  // by variable
  std::vector<uint64_t> last_run_;  // by variable: a run's index; if learning
  uint64_t num_runs_ = 0;
  std::vector<size_t> silent_;
};

// ---- The policy.

// Checked arguments of a Reducer, equal on all ranks if they are compared.
struct ReducerSetup {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  ReducerOptions options;  // comm_hook is set; names and flags are in `table`
  ParameterTable table;
  BucketPlan plan;
};

// The end of an iteration on this rank.
enum class Outcome {
  kDelivered,       // on all ranks, unless on_end_refuted() follows
  kAborted,         // on no rank; all ranks know
  kDeliveryFailed,  // reduced on all ranks, but not delivered on this one
};

// The entry of the sequence that a gradient belongs to.
struct Slot {
  uint32_t entry = 0;
  bool has_gradient = true;  // false: ready, but unused
};

// A plan, its buckets, and the sequence of their collectives.
struct BoundPlan {
  BucketPlan plan;
  std::vector<Bucket> buckets;
  std::vector<Collective*> sequence;  // buckets and used-parameter bitmap
  size_t first_bucket = 0;            // index of bucket 0 in `sequence`
  uint64_t fingerprint = 0;           // equal on ranks with equal buckets
};

// Gradients of a distributed-autograd backward. They belong to its context;
// during a reduction they are in `.grad`.
class ContextGradients {
 public:
  ContextGradients() = default;

  // Restores `.grad`. Discards gradients that write_back() did not take.
  ~ContextGradients();

  ContextGradients(const ContextGradients&) = delete;
  ContextGradients& operator=(const ContextGradients&) = delete;

  // Moves the gradient that autograd has just accumulated for `parameter` to
  // `.grad`, if this thread runs a backward of distributed autograd. Saves the
  // former `.grad`, or a copy if it lies in `buckets`, which are overwritten.
  void take(const at::Tensor& parameter, const MemoryRanges& buckets);

  // Writes the reduced gradients to the context and restores `.grad`.
  void write_back();

 private:
  struct Taken {
    at::Tensor parameter;
    at::Tensor former_gradient;  // may be undefined
  };

  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
  std::unordered_map<const c10::TensorImpl*, Taken> taken_;
};

class DataParallelPolicy {
 public:
  explicit DataParallelPolicy(ReducerSetup setup);
  DataParallelPolicy(const DataParallelPolicy&) = delete;
  DataParallelPolicy& operator=(const DataParallelPolicy&) = delete;

  // Call once, before the first prepare. REQUIRES: `hooks` live until this
  // object's destructor.
  void set_hooks(const GradientHooks& hooks);

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // options() is constant except for the comm hook.
  const ParameterTable& table() const { return table_; }
  const ReducerOptions& options() const { return options_; }
  const BucketPlan& plan() const { return bound_.plan; }

  // Lets the ranks of one host reduce in shared memory. Collective; call before
  // the first prepare. REQUIRES: ranks have compared their options.
  void connect_on_host();

  // Null: the default hook. Returns whether the sequence has changed.
  bool set_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  // Null unless find_unused_parameters or static_graph is set.
  UsedParameters* used_parameters() { return used_.get(); }
  bool is_graph_static() const;

  // ---- The sequence of collectives. Equal on all ranks; valid until a method
  // changes it.

  std::span<Collective* const> sequence() const;

  uint64_t fingerprint() const { return bound_.fingerprint; }

  // True if the all-reduce of the used-parameter bitmap is the first entry and
  // selects the buckets to reduce. Ranks then compare statuses before the first
  // launch of every iteration.
  bool skips_unused_buckets() const;

  const HookTraits& hook_traits() const { return hook_; }

  // ---- An iteration, in this order.

  // False if no parameter requires a gradient.
  bool expects_gradients() const;

  // Errors: RuntimeError if a variable was moved, cast or resized.
  void check_variables() const;

  // True once the order of gradients has been observed; in the same iteration
  // on all ranks.
  bool is_replan_due() const { return ready_order_.is_pending(); }

  // Adopts rank 0's order. Collective; call once. Throws the collective's
  // errors.
  void agree_on_order() { ready_order_.agree(group_); }

  // Plans buckets in the agreed order. Returns whether the sequence has
  // changed; equal on all ranks.
  bool replan();

  // Takes these buckets, and drops an order that is not planned yet. Returns
  // whether the sequence has changed. Errors: ValueError for an invalid plan.
  bool set_plan(std::vector<std::vector<size_t>> buckets);

  void before_iteration();
  void on_prepared(std::span<const at::Tensor> outputs);

  // True if a collective can be launched before the first gradient.
  bool begins_at_outputs() const;

  // Marks the gradient of a variable ready.
  using Mark = c10::function_ref<void(size_t variable, Slot slot)>;

  // Notes variables without a gradient, for on_iteration_over(). Call before
  // the first gradient; later calls have no effect.
  void note_missing_gradients();

  // A backward begins. Marks used parameters; call before the bitmap's launch.
  // `is_shadow`: this rank launches substitutes only.
  void mark_used_at_begin(bool is_shadow);

  // A backward begins. Marks unused parameters ready.
  void on_backward_begins(bool is_shadow, Mark mark);

  // Notes a gradient that was accumulated outside of an iteration, or before it
  // is known to belong to one. `is_defined`: false for an undefined gradient.
  void on_local_gradient(VariableIndex variable, bool is_defined);

  // Returns the slot of a gradient of the iteration; nullopt if the static
  // graph accumulates into it again.
  std::optional<Slot> on_gradient(VariableIndex variable, bool is_defined);

  // Marks gradients whose readiness is known only when a static graph's first
  // backward ends.
  void on_backward_ends(Mark mark);

  // True if a backward through the outputs may produce no gradient.
  bool may_end_without_gradients() const { return none_reached_; }

  // True while iterations are observed for the gradient order or a static
  // graph.
  bool is_learning() const;

  // All ranks have completed the iteration. Called before its results are
  // delivered or, if this rank did not wait for the others, before the next
  // prepare.
  void on_end_confirmed();

  // Called instead if it was delivered on this rank but not on all.
  void on_end_refuted();

  // The iteration is over on this rank, perhaps before it began. Throws only
  // after a complete delivery.
  void on_iteration_over(Outcome outcome, bool is_shadow);

  // ---- Failure.

  // Makes gradients that are views of buckets undefined: some hold averages,
  // others a rank's own gradient, divided.
  void drop_views() const;

  // Replaces all buckets by new ones, since collectives in flight may still
  // write to the old memory. Returns the owner of the old memory, to keep until
  // the collectives are complete. REQUIRES: drop_views().
  std::shared_ptr<void> abandon();

  // Returns the owner of all buckets, likewise. Call at destruction.
  std::shared_ptr<void> let_go();

  // Throws RuntimeError for a gradient that was ready already.
  [[noreturn]] void refuse(VariableIndex variable, IterationId id) const;

 private:
  BoundPlan bind(BucketPlan plan, const HookTraits& hook);
  bool take(BucketPlan plan);
  void adopt(BoundPlan bound);
  std::shared_ptr<void> keep(BoundPlan bound);
  void keep_out_of_buckets(VariableIndex variable) const;
  Slot ready_slot(VariableIndex variable, size_t number);
  void mark_unused(Mark mark, std::span<const size_t> variables);
  bool has_gradient(size_t number) const {
    return !used_ || used_->is_marked(number);
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const ParameterTable table_;
  ReducerOptions options_;               // comm_hook is never null
  HookTraits hook_;                      // of options_.comm_hook
  std::shared_ptr<HostSums> host_sums_;  // for default hooks; null: use group_
  const GradientHooks* hooks_ = nullptr;

  // Observed in earlier iterations.
  ReadyOrder ready_order_;
  std::optional<GraphSearch> unused_search_;  // find_unused_parameters
  bool has_searched_ = false;
  bool found_same_unused_ = true;          // in all searches
  std::vector<size_t> last_found_unused_;  // by the last search
  std::optional<HookCounts> hook_counts_;  // static_graph
  std::unique_ptr<UsedParameters> used_;   // either of the two

  MemoryRanges memory_;  // of gradients that are views
  BoundPlan bound_;

  // Valid for the prepared iteration.
  std::vector<size_t> unused_;  // variables outside the graph; ascending
  bool none_reached_ = false;   // the graph contains no parameter
  std::optional<std::vector<size_t>> without_gradient_;  // variables, if used_
  std::optional<ContextGradients> context_gradients_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DATA_PARALLEL_POLICY_H_
