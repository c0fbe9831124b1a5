#include "brigade/comm_hooks/hook_result.h"

#include <c10/util/Exception.h>

namespace brigade {

at::Tensor tensor_of_hook_result(const c10::IValue& result) {
  if (result.isNone()) return {};
  if (result.isTensor()) {
    TORCH_CHECK_TYPE(
        result.toTensor().defined(),
        "a comm hook's future must hold a tensor, got an undefined "
        "one.\nReturn a future of the reduced bucket.");
    return result.toTensor();
  }
  if (result.isTensorList()) {
    const auto tensors = result.toTensorList();
    TORCH_CHECK_TYPE(
        tensors.size() == 1,
        "a comm hook's future must hold one tensor, got a list of ",
        tensors.size());
    return tensors.get(0);
  }
  TORCH_CHECK_TYPE(false, "a comm hook's future must hold a tensor, got ",
                   result.tagKind(),
                   ".\nReturn a future of the reduced bucket.");
}

}  // namespace brigade
