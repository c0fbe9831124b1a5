// Reads the tensor out of what a C++ comm hook's future holds.

#ifndef BRIGADE_COMM_HOOKS_HOOK_RESULT_H_
#define BRIGADE_COMM_HOOKS_HOOK_RESULT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace brigade {

// Accepts a tensor or a list of one tensor, which is what c10d's futures hold,
// and a Python object that holds one.
// None gives an undefined tensor: the hook has dealt with the gradients itself.
//
// Errors: TypeError for anything else.
at::Tensor tensor_of_hook_result(const c10::IValue& result);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_HOOK_RESULT_H_
