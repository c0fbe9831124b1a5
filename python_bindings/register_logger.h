// Binds Logger as brigade.Logger.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_LOGGER_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_LOGGER_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_logger(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_LOGGER_H_
