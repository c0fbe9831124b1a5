#include "brigade/comm_hooks/ordered_hook.h"

#include "brigade/comm_hooks/hook_result.h"

namespace brigade {

OrderedHook::OrderedHook(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         OrderedOptions options)
    : group_(group, "OrderedHook"),
      collectives_(group, options),
      on_device_(options.group_size) {}

c10::intrusive_ptr<c10::ivalue::Future> OrderedHook::runHook(
    c10d::GradBucket& bucket) {
  const at::Tensor& buffer = bucket.getBuffer();
  const double scale = 1.0 / group_.size();
  if (!buffer.is_cpu()) {
    return on_device_.all_reduce(*group_.lock(), buffer, scale);
  }
  return collectives_.all_reduce(buffer, scale);
}

at::Tensor OrderedHook::parseHookResult(const c10::IValue& result) {
  return tensor_of_hook_result(result);
}

WireFormat OrderedHook::wire_format(at::ScalarType gradient_dtype) const {
  return {.dtype = gradient_dtype};
}

}  // namespace brigade
