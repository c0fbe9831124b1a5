// Whether a module still has the parameters that are reduced.
//
// When to look is the business of whoever knows the module: its registrations
// change seldom, and looking costs a walk over all of it. Shapes, dtypes and
// devices are the reducer's.
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
  // Is there for the time of a call, in place of the parameter: as what
  // torch.func.functional_call is given.
  bool stands_in = false;
};

// What there was when the module was wrapped.
struct WrappedParameters {
  std::vector<RegisteredParameter> reduced;
  std::vector<RegisteredParameter> frozen;  // and to stay so
  std::vector<at::Tensor> others;           // that may be there
  std::vector<std::string> ignored;         // names
};

// `present`: what the module has now, each tensor once. False: something stands
// in for parameters, so what is there will change again.
//
// Errors: RuntimeError naming parameters that require gradients and were added,
// replaced, removed or unfrozen: nobody would average their gradients.
bool check_parameters(std::string_view module_name,
                      const WrappedParameters& wrapped,
                      std::span<const RegisteredParameter> present);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PARAMETER_CHANGES_H_
