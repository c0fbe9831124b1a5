#include "brigade/comm_hooks/averaging_hook.h"

#include <ATen/ops/view_as_real.h>

#include <utility>

#include "brigade/comm/ordered/host_sums.h"

namespace brigade {

AveragingHook::AveragingHook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered)
    : all_reduce_(std::make_shared<AllReduceHook>(group, wire_dtype)),
      ordered_(std::move(ordered)),
      world_size_(group->getSize()),
      divisor_(world_size_) {}

void AveragingHook::divide_by_world_size() {
  ask_ = nullptr;
  divisor_ = world_size_;
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
  return all_reduce_->runHook(bucket);
}

at::Tensor AveragingHook::parseHookResult(const c10::IValue& result) {
  return all_reduce_->parseHookResult(result);
}

WireFormat AveragingHook::wire_format(at::ScalarType gradient_dtype) const {
  WireFormat format = all_reduce_->wire_format(gradient_dtype);
  format.scale = ordered_ ? 1.0 : 1.0 / divisor();
  return format;
}

std::shared_ptr<AveragingHook> default_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::optional<at::ScalarType> wire_dtype,
    std::shared_ptr<OrderedAllReduce> ordered) {
  auto hook =
      std::make_shared<AveragingHook>(group, wire_dtype, std::move(ordered));
  hook->is_default_ = true;
  return hook;
}

std::shared_ptr<AveragingHook> sum_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  auto hook = std::make_shared<AveragingHook>(group);
  hook->divide_by([] { return 1.0; });
  return hook;
}

}  // namespace brigade
