#include "brigade/python_bindings/averaging_hook.h"

#include <utility>

#include "brigade/comm_hooks/hook_result.h"

namespace brigade {

AveragingHook::AveragingHook(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : world_size_(group->getSize()),
      all_reduce_(all_reduce_hook(std::move(group))),
      divisor_(world_size_) {}

void AveragingHook::divide_by_world_size() {
  count_ = nullptr;
  divisor_ = world_size_;
}

void AveragingHook::divide_by(c10::intrusive_ptr<c10d::Work> count) {
  count_ = std::move(count);
}

double AveragingHook::divisor() const {
  if (count_) {
    const auto future = count_->getFuture();
    future->waitAndThrow();
    divisor_ = tensor_of_hook_result(future->value()).item<double>();
    count_ = nullptr;
  }
  return divisor_;
}

c10::intrusive_ptr<c10::ivalue::Future> AveragingHook::runHook(
    c10d::GradBucket& bucket) {
  return all_reduce_->runHook(bucket);
}

at::Tensor AveragingHook::parseHookResult(const c10::IValue& result) {
  return all_reduce_->parseHookResult(result);
}

WireFormat AveragingHook::wire_format(at::ScalarType gradient_dtype) const {
  WireFormat format = all_reduce_->wire_format(gradient_dtype);
  format.scale = 1.0 / divisor();
  return format;
}

}  // namespace brigade
