// Functions that add one part each to the extension module brigade._C.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_checkpoints(py::module_& module);
void register_functions(py::module_& module);
void register_reducer(py::module_& module);
void register_sharding(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_
