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
// A rank's buckets wait for its peers on connections of the hook's own, which
// do not end with the group's.  The control channel tells a failure as ever;
// without one, peers of a rank that failed know when it lets go of the hook, or
// at the group's timeout.
//
// Thread safety: one call at a time.  Several reducers may share a hook if
// their buckets come in the same order on all ranks.

#ifndef BRIGADE_COMM_HOOKS_ORDERED_HOOK_H_
#define BRIGADE_COMM_HOOKS_ORDERED_HOOK_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/ordered/ordered_on_device.h"
#include "brigade/comm_hooks/group_reference.h"
#include "brigade/comm_hooks/wire_format.h"

namespace brigade {

// Of dense gradients; on devices the group's backend moves them
// (comm/ordered/ordered_on_device.h). Sparse ones come out of backward as
// ValueError.
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
  const GroupReference group_;
  OrderedCollectives collectives_;  // of tensors on the CPU
  OrderedOnDevice on_device_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_ORDERED_HOOK_H_
