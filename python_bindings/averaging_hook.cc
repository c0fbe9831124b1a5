#include "brigade/python_bindings/averaging_hook.h"

#include <utility>

#include "brigade/comm_hooks/hook_result.h"

namespace brigade {

AveragingHook::AveragingHook(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)), all_reduce_(all_reduce_hook(group_)) {}

void AveragingHook::divide_by_world_size() {
  count_ = nullptr;
  correction_ = 1.0;
}

void AveragingHook::divide_by(c10::intrusive_ptr<c10d::Work> count) {
  count_ = std::move(count);
}

c10::intrusive_ptr<c10::ivalue::Future> AveragingHook::runHook(
    c10d::GradBucket& bucket) {
  if (count_) {
    const auto future = count_->getFuture();
    future->waitAndThrow();
    correction_ = group_->getSize() /
                  tensor_of_hook_result(future->value()).item<double>();
    count_ = nullptr;
  }
  if (correction_ != 1.0) bucket.getBufferRef().mul_(correction_);
  return all_reduce_->runHook(bucket);
}

at::Tensor AveragingHook::parseHookResult(const c10::IValue& result) {
  return all_reduce_->parseHookResult(result);
}

WireFormat AveragingHook::wire_format(at::ScalarType gradient_dtype) const {
  return all_reduce_->wire_format(gradient_dtype);
}

}  // namespace brigade
