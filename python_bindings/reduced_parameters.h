// What a Python module's reducer is made of.
//
// Thread safety: the caller holds the GIL.

#ifndef BRIGADE_PYTHON_BINDINGS_REDUCED_PARAMETERS_H_
#define BRIGADE_PYTHON_BINDINGS_REDUCED_PARAMETERS_H_

#include <pybind11/typing.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <string>
#include <vector>

#include "brigade/reducer/parameter_names.h"

namespace brigade {

struct ReducedParameters {
  py::list tensors;
  // The same, or empty: not yet or no longer there.
  std::vector<at::Tensor> tensors_in_cpp;
  // By tensor, or empty: "encoder.weight".
  ParameterNames names;
  std::vector<bool> expect_sparse;
};

using NamesByIndex = py::typing::Dict<size_t, std::string>;

// By index, without the dot that torch puts before the names of the root's own
// parameters. Errors: RuntimeError if there is no such parameter.
ParameterNames names_of(const NamesByIndex& by_index, size_t count);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REDUCED_PARAMETERS_H_
