// Parts of the extension module brigade._C; module.cc calls each once.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_bench(py::module_& module);
void register_checkpoints(py::module_& module);
void register_groups(py::module_& module);
void register_module_entries(py::module_& module);
void register_reducer(py::module_& module);
void register_sharding(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_
