// Checkpoints of sharded models that C++ programs read and write too
// (fsdp/checkpoint/optimizer_checkpoint.h), for brigade.save_whole() and the
// like.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_CHECKPOINTS_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_CHECKPOINTS_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_checkpoints(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_CHECKPOINTS_H_
