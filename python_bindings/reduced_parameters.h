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

namespace brigade {

struct ReducedParameters {
  py::list tensors;
  // By tensor, or empty: "encoder.weight".
  std::vector<std::string> names;
  std::vector<bool> expect_sparse;
};

using NamesByIndex = py::typing::Dict<size_t, std::string>;

// By index, without the dot that torch puts before the names of the root's own
// parameters. Errors: RuntimeError if there is no such parameter.
std::vector<std::string> names_of(const NamesByIndex& by_index, size_t count);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REDUCED_PARAMETERS_H_
