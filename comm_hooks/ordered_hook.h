// Averages whose bits do not depend on the buckets: an element is summed in the
// order of the ranks, whatever it travels with
// (comm/ordered/ordered_collectives.h).
//
//   options.comm_hook = std::make_shared<OrderedHook>(group);
//
// ReducerOptions::reproducible is the same without a hook of one's own, and
// refuses gradients that can't be summed so when the reducer is made.
//
// So a run that plans other buckets, or rebuilds them at another step, or runs
// its backward in another order, gives the same gradients to the last bit.
//
// The sum is divided once, when it is there: float16 gradients overflow only
// where their average does.
//
// Thread safety: one call at a time.  Several reducers may share a hook if
// their buckets come in the same order on all ranks.

#ifndef BRIGADE_COMM_HOOKS_ORDERED_HOOK_H_
#define BRIGADE_COMM_HOOKS_ORDERED_HOOK_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/ordered_all_reduce.h"
#include "brigade/comm_hooks/wire_format.h"

namespace brigade {

// Of dense gradients (comm_hooks/ordered_all_reduce.h). Sparse ones are a
// ValueError in backward.
class OrderedHook final : public c10d::CommHookInterface,
                          public DeclaresWireFormat {
 public:
  // Collective.  Does not keep the group alive.  Errors: ValueError if `group`
  // is null; as OrderedCollectives'.
  explicit OrderedHook(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       OrderedOptions options = {});

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;
  WireFormat wire_format(at::ScalarType gradient_dtype) const override;
  bool lets_go_of_buffer() const override { return true; }
  bool sums_in_order() const override { return true; }

 private:
  OrderedAllReduce all_reduce_;
  const double world_size_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_ORDERED_HOOK_H_
