#include "brigade/comm_hooks/all_reduce_hook.h"

#include <ATen/ops/view_as_real.h>

#include <utility>
#include <vector>

#include "brigade/comm/streams/future_of_work.h"
#include "brigade/comm_hooks/hook_result.h"

namespace brigade {

AllReduceHook::AllReduceHook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype)
    : group_(group, "AllReduceHook"), wire_dtype_(wire_dtype) {}

c10::intrusive_ptr<c10::ivalue::Future> AllReduceHook::runHook(
    c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  std::vector<at::Tensor> tensors = {
      buffer.is_complex() ? at::view_as_real(buffer) : buffer};
  return future_of(group_.lock()->allreduce(tensors), buffer);
}

at::Tensor AllReduceHook::parseHookResult(const c10::IValue& result) {
  return tensor_of_hook_result(result);
}

WireFormat AllReduceHook::wire_format(at::ScalarType gradient_dtype) const {
  const double scale = 1.0 / group_.size();
  const bool compress =
      wire_dtype_.has_value() && c10::isFloatingType(gradient_dtype) &&
      c10::elementSize(gradient_dtype) > c10::elementSize(*wire_dtype_);
  return {.dtype = compress ? *wire_dtype_ : gradient_dtype, .scale = scale};
}

std::shared_ptr<AllReduceHook> all_reduce_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AllReduceHook>(group);
}

std::shared_ptr<AllReduceHook> fp16_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AllReduceHook>(group, at::kHalf);
}

std::shared_ptr<AllReduceHook> bf16_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AllReduceHook>(group, at::kBFloat16);
}

}  // namespace brigade
