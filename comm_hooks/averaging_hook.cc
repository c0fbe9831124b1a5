#include "brigade/comm_hooks/averaging_hook.h"

#include <ATen/ops/view_as_real.h>

#include <utility>
#include <vector>

#include "brigade/comm/ordered/host_sums.h"
#include "brigade/comm/streams/streams.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/comm_hooks/ordered_all_reduce.h"

namespace brigade {

AveragingHook::AveragingHook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered, bool takes_host_sums)
    : group_(group, "a comm hook"),
      wire_dtype_(wire_dtype),
      ordered_(std::move(ordered)),
      takes_host_sums_(takes_host_sums),
      divisor_(group_.size()) {}

void AveragingHook::divide_by_world_size() {
  ask_ = nullptr;
  divisor_ = group_.size();
}

void AveragingHook::divide_by(std::function<double()> divisor) {
  ask_ = std::move(divisor);
}

double AveragingHook::divisor() const {
  if (ask_) {
    divisor_ = ask_();
    ask_ = nullptr;
  }
  return divisor_;
}

c10::intrusive_ptr<c10::ivalue::Future> AveragingHook::runHook(
    c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const at::Tensor reals =
      buffer.is_complex() ? at::view_as_real(buffer) : buffer;
  if (ordered_) return ordered_->run(reals, 1.0 / divisor());
  if (host_sums_ && HostSums::can_reduce(reals)) {
    return host_sums_->all_reduce(reals);
  }
  std::vector<at::Tensor> tensors = {reals};
  return future_of(group_.lock()->allreduce(tensors), buffer);
}

at::Tensor AveragingHook::parseHookResult(const c10::IValue& result) {
  return tensor_of_hook_result(result);
}

WireFormat AveragingHook::wire_format(at::ScalarType gradient_dtype) const {
  const bool compress =
      wire_dtype_.has_value() && c10::isFloatingType(gradient_dtype) &&
      c10::elementSize(gradient_dtype) > c10::elementSize(*wire_dtype_);
  return {.dtype = compress ? *wire_dtype_ : gradient_dtype,
          .scale = ordered_ ? 1.0 : 1.0 / divisor()};
}

CommHookPtr all_reduce_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group);
}

CommHookPtr fp16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group, at::kHalf);
}

CommHookPtr bf16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return std::make_shared<AveragingHook>(group, at::kBFloat16);
}

CommHookPtr ordered_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto ordered = std::make_shared<OrderedAllReduce>(group);
  ordered->connect();
  return std::make_shared<AveragingHook>(group, std::nullopt,
                                         std::move(ordered));
}

std::shared_ptr<AveragingHook> default_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered) {
  return std::make_shared<AveragingHook>(group, wire_dtype, std::move(ordered),
                                         /*takes_host_sums=*/true);
}

}  // namespace brigade
