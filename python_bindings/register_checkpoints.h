// Registers checkpoints that C++ programs read and write too
// (checkpoint/checkpoint.h), for brigade.save_whole() and its companions.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_CHECKPOINTS_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_CHECKPOINTS_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_checkpoints(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_CHECKPOINTS_H_
