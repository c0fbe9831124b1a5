// Binds ModuleScan, and the comparison of a module's tables.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_MODULE_SCAN_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_MODULE_SCAN_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_module_scan(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_MODULE_SCAN_H_
