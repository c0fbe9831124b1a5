// The buckets of a Reducer: the sequence of their collectives, the gradients
// that will not come, and new plans. Variables go by their number.
//
// Thread safety: none; the engine's lock covers it, but for table().

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
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/hooks/gradient_hooks.h"
#include "brigade/hooks/graph_search.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/bucket.h"
#include "brigade/reducer/bucket_memory.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/context_gradients.h"
#include "brigade/reducer/learned_graph.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/reducer_setup.h"
#include "brigade/reducer/used_parameters.h"

namespace brigade {

class HostSums;

// How an iteration ended.
enum class Outcome {
  kDelivered,       // well; on all ranks, unless on_end_refuted() follows
  kAborted,         // on no rank, and all know
  kDeliveryFailed,  // well on all ranks, but this one could not deliver
};

// The entry of the sequence that a gradient belongs to.
struct Slot {
  uint32_t entry = 0;
  bool has_gradient = true;  // false: it counts as ready without one
};

// A plan, its buckets, and the sequence of collectives.
struct BoundPlan {
  BucketPlan plan;
  std::vector<Bucket> buckets;
  std::vector<Collective*> sequence;  // the buckets, and the used map
  size_t first_bucket = 0;            // its place there; the others follow
  uint64_t fingerprint = 0;  // equal on ranks that launch the same lengths
};

class DataParallelPolicy {
 public:
  explicit DataParallelPolicy(ReducerSetup setup);
  DataParallelPolicy(const DataParallelPolicy&) = delete;
  DataParallelPolicy& operator=(const DataParallelPolicy&) = delete;

  // Once, before anything is prepared. REQUIRES: they outlive this object but
  // for its destructor.
  void set_hooks(const GradientHooks& hooks);

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // Constant, but for the comm hook.
  const ParameterTable& table() const { return table_; }
  const ReducerOptions& options() const { return options_; }
  const BucketPlan& plan() const { return bound_.plan; }

  // Ranks of one host sum in shared memory from here on. Collective, before
  // anything is prepared. REQUIRES: ranks have compared their options.
  void connect_on_host();

  // Null: the default. Returns whether the sequence has changed.
  bool set_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  // Null unless unused parameters are looked for or the graph is static.
  UsedParameters* used_parameters() { return used_.get(); }
  bool is_graph_static() const;

  // ---- The sequence. Equal on all ranks; valid until a method changes it.

  std::span<Collective* const> sequence() const;

  uint64_t fingerprint() const { return bound_.fingerprint; }

  // The used map's sum is the first entry and decides which buckets are left
  // out. Ranks compare before the first launch of every iteration.
  bool skips_unused_buckets() const;

  const HookTraits& hook_traits() const { return hook_; }

  // ---- An iteration, in this order.

  // False: no backward brings gradients; nothing is prepared.
  bool expects_gradients() const;

  // Errors: RuntimeError if a variable was moved, cast or resized.
  void check_variables() const;

  // On all ranks at the same place: the order of gradients has been observed.
  bool is_replan_due() const { return ready_order_.is_pending(); }

  // Takes rank 0's order. Collective, once. Throws its errors.
  void agree_on_order() { ready_order_.agree(group_); }

  // Plans in that order. Returns whether the sequence has changed, which is
  // equal on all ranks.
  bool replan();

  void before_iteration();
  void on_prepared(std::span<const at::Tensor> outputs);

  // True if something can be launched before any gradient has come.
  bool begins_at_outputs() const;

  // The gradient of a variable is as ready as it will be.
  using Mark = c10::function_ref<void(size_t variable, Slot slot)>;

  // A backward begins: marks the used parameters, before their sum is launched;
  // then the gradients that will not come. `is_shadow`: this rank launches
  // substitutes only.
  void mark_used_at_begin(bool is_shadow);
  void on_backward_begins(bool is_shadow, Mark mark);

  // A gradient has been accumulated outside of an iteration, or before it is
  // known to be one of it. `is_defined`: false if it is undefined.
  void on_local_gradient(VariableIndex variable, bool is_defined);

  // Where a gradient of the iteration goes; none: more parts of it are to come.
  std::optional<Slot> on_gradient(VariableIndex variable, bool is_defined);

  // Marks the gradients that only the end of a static graph's first backward
  // tells.
  void on_backward_ends(Mark mark);

  // A backward that reached the outputs may bring no gradient at all.
  bool may_end_without_gradients() const { return none_reached_; }

  // The end of an iteration will tell the order of gradients or a static graph.
  bool is_learning() const;

  // All ranks have ended the iteration well: before its results are delivered,
  // or, if this one did not wait for the others, before the next is prepared.
  void on_end_confirmed();

  // In place of that: it has been delivered here, and not on all ranks.
  void on_end_refuted();

  // It is over on this rank, perhaps before it began. Must not throw unless all
  // was delivered.
  void on_iteration_over(Outcome outcome, bool is_shadow);

  // ---- A peer is lost.

  // Goes on with other memory than these may still write to; their contents are
  // lost. Returns an owner of theirs, to be kept until they are done.
  std::shared_ptr<void> abandon(std::span<Collective* const> in_flight);

  // The same at destruction.
  std::shared_ptr<void> let_go();

  // A gradient came that was ready already. Throws RuntimeError.
  [[noreturn]] void refuse(VariableIndex variable, IterationId id) const;

 private:
  BoundPlan bind(BucketPlan plan, const HookTraits& hook);
  void adopt(BoundPlan bound);
  std::shared_ptr<void> keep(BoundPlan bound);
  void keep_out_of_buckets(VariableIndex variable) const;
  void predict_unused(std::span<const at::Tensor> outputs);
  Slot ready_slot(VariableIndex variable, size_t number);
  void mark_unused(Mark mark, std::span<const size_t> variables);
  void zero_views(const Bucket& bucket, size_t index) const;
  bool has_gradient(size_t number) const {
    return !used_ || used_->is_marked(number);
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const ParameterTable table_;
  ReducerOptions options_;  // constant but for comm_hook, which is never null
  HookTraits hook_;         // of that one
  std::shared_ptr<HostSums> host_sums_;  // of default hooks; null: the group's
  const GradientHooks* hooks_ = nullptr;

  // Of the graph, from earlier iterations.
  ReadyOrder ready_order_;
  std::optional<GraphSearch> unused_search_;  // if it may change
  bool has_searched_ = false;
  bool found_same_unused_ = true;          // in all searches
  std::vector<size_t> last_found_unused_;  // by the last search
  std::optional<HookCounts> hook_counts_;  // if it is static
  std::unique_ptr<UsedParameters> used_;   // in both cases

  MemoryRanges memory_;  // of the gradients that are views
  BoundPlan bound_;

  // Of the iteration that is prepared.
  std::vector<size_t> unused_;  // variables that no gradient reaches; ascending
  bool none_reached_ = false;   // the graph shows no parameter
  std::optional<ContextGradients> context_gradients_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DATA_PARALLEL_POLICY_H_
