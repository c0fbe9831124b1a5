// Data parallelism as a policy of the engine: every rank holds all parameters,
// and their gradients are averaged bucket by bucket.
//
// Knows buckets, which parameters are used, and when buckets are planned anew.
// What it refers to by name are parameters of the table.
//
// Thread safety: none; the engine's lock covers it, but for table().

#ifndef BRIGADE_REDUCER_DATA_PARALLEL_POLICY_H_
#define BRIGADE_REDUCER_DATA_PARALLEL_POLICY_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/engine/state/reduction_policy.h"
#include "brigade/hooks/gradient_hooks.h"
#include "brigade/reducer/bound_plan.h"
#include "brigade/reducer/context_gradients.h"
#include "brigade/reducer/hook_counts.h"
#include "brigade/reducer/memory_ranges.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/ready_order.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/reducer_setup.h"
#include "brigade/reducer/statistics.h"
#include "brigade/reducer/unused_parameter_search.h"
#include "brigade/reducer/used_parameters.h"

namespace brigade {

class HostSums;

class DataParallelPolicy final : public ReductionPolicy {
 public:
  explicit DataParallelPolicy(ReducerSetup setup);
  DataParallelPolicy(const DataParallelPolicy&) = delete;
  DataParallelPolicy& operator=(const DataParallelPolicy&) = delete;

  // Those of the table's variables, by which it finds parameters in graphs. To
  // be called once, before anything is prepared. REQUIRES: they outlive this
  // object but for its destructor.
  void set_hooks(const GradientHooks& hooks);

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

  // What the table and the options are does not change, but for strides and the
  // hook.
  const ParameterTable& table() const { return table_; }
  const ReducerOptions& options() const { return options_; }
  const BucketPlan& plan() const { return bound_.plan; }

  // Collective, where ranks have compared their options: those that are on one
  // host meet there. Before anything is prepared.
  void connect_on_host();

  // Null: the default. Returns whether the sequence is another one.
  bool set_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  // Null unless unused parameters are looked for or the graph is static.
  UsedParameters* used_parameters() { return used_.get(); }
  bool is_graph_static() const;

  // An iteration tells more when its backward is over: the order of gradients,
  // or a static graph.
  bool is_learning() const override;

  // Counts of its own; the engine's are 0.
  ReducerStatistics statistics() const;

  std::span<Collective* const> sequence() override;
  uint64_t fingerprint() const override { return bound_.fingerprint; }
  std::string describe_sequence() const override;
  bool compares_each_iteration() const override;
  const HookTraits& hook_traits() const override { return hook_; }

  bool expects_gradients() const override;
  void check_variables() const override;
  Replanned replan(const CallCollective& call) override;
  bool before_iteration() override;
  void on_prepared(std::span<const at::Tensor> outputs) override;
  bool begins_at_outputs() const override;
  void on_backward_begins(RunningIteration& iteration, bool is_shadow) override;
  void on_local_gradient(VariableIndex variable, bool is_defined) override;
  std::optional<Slot> on_gradient(VariableIndex variable,
                                  bool is_defined) override;
  void on_backward_ends(RunningIteration& iteration) override;
  bool may_end_without_gradients() const override {
    return prediction_.none_reached;
  }
  void on_end_confirmed() override;
  void on_end_refuted() override;
  void on_iteration_over(Outcome outcome, bool is_shadow) override;

  std::shared_ptr<void> abandon(
      std::span<Collective* const> in_flight) override;
  std::shared_ptr<void> let_go() override;

  std::string name_of(std::span<const size_t> variables) const override;
  std::string describe_missing(std::span<const size_t> variables,
                               Occasion occasion) const override;
  std::string describe_late(VariableIndex variable,
                            Occasion occasion) const override;
  [[noreturn]] void refuse(VariableIndex variable,
                           Occasion occasion) const override;

 private:
  BoundPlan bind(BucketPlan plan, const HookTraits& hook);
  void adopt(BoundPlan bound);
  std::shared_ptr<void> keep(BoundPlan bound);
  void keep_out_of_buckets(VariableIndex variable) const;
  void follow_strides();
  UnusedPrediction predict_unused(std::span<const at::Tensor> outputs);
  Slot ready_slot(VariableIndex variable, size_t number);
  void mark_unused(RunningIteration& iteration,
                   std::span<const size_t> variables);
  void zero_views(const Bucket& bucket, size_t index) const;
  bool skips_unused_buckets() const;
  bool has_gradient(size_t number) const {
    return !used_ || used_->is_marked(number);
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  ParameterTable table_;
  ReducerOptions options_;  // constant but for comm_hook, which is never null
  HookTraits hook_;         // of that one
  std::shared_ptr<HostSums> host_sums_;  // of default hooks; null: the group's
  const GradientHooks* hooks_ = nullptr;
  ReducerStatistics statistics_;

  // What earlier iterations told of the graph. A static one needs no search;
  // what ranks used is summed once.
  ReadyOrder ready_order_;
  std::optional<UnusedParameterSearch> unused_search_;  // if it may change
  std::optional<HookCounts> hook_counts_;               // if it is static
  std::unique_ptr<UsedParameters> used_;                // in both cases

  MemoryRanges memory_;  // of the gradients that are views
  BoundPlan bound_;

  // Of the iteration that is prepared.
  UnusedPrediction prediction_;
  std::optional<ContextGradients> context_gradients_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_DATA_PARALLEL_POLICY_H_
