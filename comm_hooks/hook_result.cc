#include "brigade/comm_hooks/hook_result.h"

#include <c10/util/Exception.h>

namespace brigade {

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
