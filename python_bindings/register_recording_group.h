// Binds groups without a network, for benchmarks and tests: recording_group().

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_RECORDING_GROUP_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_RECORDING_GROUP_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_recording_group(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_RECORDING_GROUP_H_
