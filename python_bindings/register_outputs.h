// Binds what is done to the outputs of a forward: tie_outputs().

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_OUTPUTS_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_OUTPUTS_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_outputs(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_OUTPUTS_H_
