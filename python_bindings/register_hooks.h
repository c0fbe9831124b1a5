// Binds what comm hooks written in Python need: then_collective().

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_HOOKS_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_HOOKS_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_hooks(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_HOOKS_H_
