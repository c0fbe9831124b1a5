// The comm hook that a TorchReducer starts with: an averaging all-reduce whose
// divisor may be the number of ranks that still have data.
//
// torch's join counts those ranks by an all-reduce of ones before each forward
// and hands the reducer its work; whether to divide by that number or by the
// world size is the user's choice.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_PYTHON_BINDINGS_AVERAGING_HOOK_H_
#define BRIGADE_PYTHON_BINDINGS_AVERAGING_HOOK_H_

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/all_reduce_hook.h"
#include "brigade/comm_hooks/wire_format.h"

namespace brigade {

class AveragingHook final : public c10d::CommHookInterface,
                            public DeclaresWireFormat {
 public:
  explicit AveragingHook(c10::intrusive_ptr<c10d::ProcessGroup> group);

  // Until the next call: the divisor is the world size.
  void divide_by_world_size();

  // Until the next call: the divisor is the number that `count` ends with,
  // which is waited for when the first bucket is packed.
  void divide_by(c10::intrusive_ptr<c10d::Work> count);

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;
  WireFormat wire_format(at::ScalarType gradient_dtype) const override;

 private:
  double divisor() const;

  const double world_size_;
  const std::shared_ptr<AllReduceHook> all_reduce_;
  mutable c10::intrusive_ptr<c10d::Work> count_;  // null: known
  mutable double divisor_;
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_AVERAGING_HOOK_H_
