// The built-in comm hooks: averaging all-reduces, in the gradients' own dtype
// or in a smaller one on the wire.
//
// Thread safety: a hook has no state that changes; several reducers may share
// one.

#ifndef BRIGADE_COMM_HOOKS_ALL_REDUCE_HOOK_H_
#define BRIGADE_COMM_HOOKS_ALL_REDUCE_HOOK_H_

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/group_reference.h"
#include "brigade/comm_hooks/wire_format.h"

namespace brigade {

// Sums a bucket over the group. Its buffers hold gradients that are already
// divided by the world size (wire_format), so that the sum is the average.
//
// Complex buckets travel as pairs of reals. Gradients that are not floating
// point numbers of more than `wire_dtype`'s size are not compressed.
class AllReduceHook final : public c10d::CommHookInterface,
                            public DeclaresWireFormat {
 public:
  // `wire_dtype`: nullopt for the gradients' own. Does not keep the group
  // alive. Errors: ValueError if `group` is null.
  explicit AllReduceHook(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      std::optional<at::ScalarType> wire_dtype = std::nullopt);

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;
  WireFormat wire_format(at::ScalarType gradient_dtype) const override;
  bool lets_go_of_buffer() const override { return true; }

 private:
  const GroupReference group_;
  const std::optional<at::ScalarType> wire_dtype_;
};

// The default: gradients averaged in their own dtype.
std::shared_ptr<AllReduceHook> all_reduce_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Half the bytes of float32. Divides before the cast, so that a sum overflows
// only where the average does. Range: 6e-8 to 65504; larger gradients become
// infinite.
//
// Source: torch.distributed's fp16_compress_hook. Differs: it casts first and
// divides the half-precision numbers.
std::shared_ptr<AllReduceHook> fp16_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Half the bytes of float32, with its range and 8 bits of precision.
std::shared_ptr<AllReduceHook> bf16_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_ALL_REDUCE_HOOK_H_
