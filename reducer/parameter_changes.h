// Check that a module still has the parameters that are reduced. The reducer
// checks shapes, dtypes and devices.
//
// Thread safety: reads the tensors.

#ifndef BRIGADE_REDUCER_PARAMETER_CHANGES_H_
#define BRIGADE_REDUCER_PARAMETER_CHANGES_H_

#include <ATen/core/Tensor.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace brigade {

struct RegisteredParameter {
  std::string name;
  at::Tensor tensor;
  // In place of the parameter for one call, by torch.func.functional_call.
  bool stands_in = false;
};

// When the module was wrapped.
struct WrappedParameters {
  std::vector<RegisteredParameter> reduced;
  std::vector<RegisteredParameter> frozen;  // and to stay so
  std::vector<at::Tensor> others;           // that may be there
  std::vector<std::string> ignored;         // names
};

// `present`: of the module now, each tensor once. False: something stands in
// for parameters, so that they will change again.
//
// Errors: RuntimeError naming parameters that require gradients and were added,
// replaced, removed or unfrozen: nobody would average their gradients.
bool check_parameters(std::string_view module_name,
                      const WrappedParameters& wrapped,
                      std::span<const RegisteredParameter> present);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PARAMETER_CHANGES_H_
