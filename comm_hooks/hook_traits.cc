#include "brigade/comm_hooks/hook_traits.h"

#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"

namespace brigade {

at::ScalarType HookTraits::wire_dtype(at::ScalarType gradient_dtype) const {
  return wire_format == nullptr
             ? gradient_dtype
             : wire_format->wire_format(gradient_dtype).dtype;
}

HookTraits traits_of(c10d::CommHookInterface& hook) {
  auto* const extension = dynamic_cast<CommHookExtension*>(&hook);
  if (extension == nullptr) return {.hook = &hook};
  return {
      .hook = &hook,
      .wire_format = extension->declares_wire_format() ? extension : nullptr,
      .listener = extension,
      .host_sums = extension->takes_host_sums() ? extension : nullptr,
      .fails_by_network_only = extension->fails_by_network_only(),
      .lets_go_of_buffer = extension->lets_go_of_buffer(),
      .sums_in_order = extension->sums_in_order(),
      .throws_own_errors = extension->throws_own_errors(),
      .steps_parameters = extension->steps_parameters(),
      .name = extension->hook_name()};
}

std::string describe(const HookTraits& hook) {
  return hook.name.empty() ? "the comm hook"
                           : absl::StrCat("comm hook ", hook.name);
}

WireFormat WrappingHook::wire_format(at::ScalarType gradient_dtype) const {
  return traits_.wire_format == nullptr
             ? WireFormat{.dtype = gradient_dtype}
             : traits_.wire_format->wire_format(gradient_dtype);
}

at::Tensor tensor_of_hook_result(const c10::IValue& result) {
  if (result.isNone()) return {};
  at::Tensor tensor;
  if (result.isTensor()) {
    tensor = result.toTensor();
  } else if (result.isTensorList()) {
    const auto tensors = result.toTensorList();
    TORCH_CHECK_TYPE(
        tensors.size() == 1,
        "a comm hook's future must hold one tensor, got a list of ",
        tensors.size(), ".\nReturn a future of the reduced bucket.");
    tensor = tensors.get(0);
  } else if (result.isPyObject()) {  // of a process group written in Python
    const auto tensors = result.toPyObjectHolder()->extractTensors();
    TORCH_CHECK_TYPE(
        tensors.size() == 1,
        "a comm hook's future must hold one tensor, got a Python object with ",
        tensors.size(), ".\nReturn a future of the reduced bucket.");
    tensor = tensors.front();
  } else {
    TORCH_CHECK_TYPE(false, "a comm hook's future must hold a tensor, got ",
                     result.tagKind(),
                     ".\nReturn a future of the reduced bucket.");
  }
  TORCH_CHECK_TYPE(tensor.defined(),
                   "a comm hook's future must hold a tensor, got an undefined "
                   "one.\nReturn a future of the reduced bucket.");
  return tensor;
}

}  // namespace brigade
