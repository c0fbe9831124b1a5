// Averages gradients by weights that ranks give in each iteration: the sum of
// w_r g_r over the ranks, divided by the sum of w_r.
//
// The weights' sum, 8 bytes, travels beside each bucket, and divides it where
// it arrives: nothing is waited for. w_r g_r must fit the gradients' dtype.
//
// Example, with losses that are means over samples:
//
//   auto weighted = std::make_shared<WeightedMeanHook>(group);
//   DistributedDataParallel model(net, group,
//                                 {.reducer = {.comm_hook = weighted}});
//   for (const auto& [input, target] : batches_of_this_rank) {
//     weighted->set_weight(input.size(0));  // ranks' batches differ in size
//     loss(model(input), target).backward();
//   }
//
// Thread safety: one call at a time.

#ifndef BRIGADE_COMM_HOOKS_WEIGHTED_MEAN_HOOK_H_
#define BRIGADE_COMM_HOOKS_WEIGHTED_MEAN_HOOK_H_

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/comm_hooks/group_reference.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {

class WeightedMeanHook final : public c10d::CommHookInterface,
                               public DeclaresWireFormat,
                               public IterationListener {
 public:
  // All weights are 1 until others are set. Does not keep the group alive.
  // Errors: ValueError if it is null.
  explicit WeightedMeanHook(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  // Of this rank, from the next backward that is reduced on. A rank that has
  // run out of data while ranks join weighs nothing. If all weights are 0,
  // backward throws RuntimeError on every rank where weights are added up on
  // the CPU; on other devices gradients become NaN.
  //
  // Errors: ValueError if `weight` is negative or not finite.
  void set_weight(double weight);

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;
  WireFormat wire_format(at::ScalarType gradient_dtype) const override;
  bool lets_go_of_buffer() const override { return true; }
  void iteration_begins(bool has_data) override;

 private:
  const GroupReference group_;
  const std::shared_ptr<AveragingHook> all_reduce_;
  double weight_ = 1.0;   // of the next iteration
  double current_ = 1.0;  // of the one that is being reduced
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_WEIGHTED_MEAN_HOOK_H_
