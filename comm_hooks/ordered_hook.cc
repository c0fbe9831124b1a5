#include "brigade/comm_hooks/ordered_hook.h"

#include "brigade/comm_hooks/hook_result.h"

namespace brigade {

OrderedHook::OrderedHook(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         OrderedOptions options)
    : all_reduce_(group, options), world_size_(group->getSize()) {
  all_reduce_.connect();
}

c10::intrusive_ptr<c10::ivalue::Future> OrderedHook::runHook(
    c10d::GradBucket& bucket) {
  return all_reduce_.run(bucket.getBuffer(), 1.0 / world_size_);
}

at::Tensor OrderedHook::parseHookResult(const c10::IValue& result) {
  return tensor_of_hook_result(result);
}

WireFormat OrderedHook::wire_format(at::ScalarType gradient_dtype) const {
  return {.dtype = gradient_dtype};
}

}  // namespace brigade
