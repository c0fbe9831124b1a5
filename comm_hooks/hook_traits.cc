#include "brigade/comm_hooks/hook_traits.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"

namespace brigade {

at::ScalarType HookTraits::wire_dtype(at::ScalarType gradient_dtype) const {
  return wire_format == nullptr
             ? gradient_dtype
             : wire_format->wire_format(gradient_dtype).dtype;
}

HookTraits traits_of(c10d::CommHookInterface& hook) {
  auto* const extension = dynamic_cast<CommHookExtension*>(&hook);
  HookTraits traits = extension == nullptr ? HookTraits() : extension->traits();
  traits.hook = &hook;
  traits.wire_format = traits.declares_wire_format ? extension : nullptr;
  traits.listener = extension;
  traits.host_sums = traits.takes_host_sums ? extension : nullptr;
  return traits;
}

std::string describe(const HookTraits& hook) {
  return hook.name.empty() ? "the comm hook"
                           : absl::StrCat("comm hook ", hook.name);
}

HookTraits WrappingHook::traits() const {
  HookTraits traits = traits_;
  traits.declares_wire_format = true;
  traits.takes_host_sums = false;
  traits.releases_buffer = false;
  return traits;
}

WireFormat WrappingHook::wire_format(at::ScalarType gradient_dtype) const {
  return traits_.wire_format == nullptr
             ? WireFormat{.dtype = gradient_dtype}
             : traits_.wire_format->wire_format(gradient_dtype);
}

at::IntArrayRef gradient_strides(const at::Tensor& parameter,
                                 at::DimVector& storage) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides();
  const at::IntArrayRef sizes = parameter.sizes();
  storage.assign(sizes.size(), 1);
  for (auto d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
    storage[d] = storage[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  }
  return storage;
}

at::Tensor tensor_of_hook_result(const c10::IValue& result) {
  if (result.isNone()) return {};
  std::vector<at::Tensor> tensors;
  if (result.isTensor()) {
    tensors = {result.toTensor()};
  } else if (result.isTensorList()) {
    tensors = result.toTensorVector();
  } else if (result.isPyObject()) {  // of a process group written in Python
    tensors = result.toPyObjectHolder()->extractTensors();
  } else {
    TORCH_CHECK_TYPE(false, "a comm hook's future: expected a tensor, found ",
                     result.tagKind(),
                     ".\nReturn a future of the reduced bucket.");
  }
  TORCH_CHECK_TYPE(tensors.size() == 1 && tensors.front().defined(),
                   "a comm hook's future: expected one tensor, found ",
                   tensors.size() == 1
                       ? "an undefined one"
                       : absl::StrCat(tensors.size(), " tensors"),
                   ".\nReturn a future of the reduced bucket.");
  return tensors.front();
}

}  // namespace brigade
