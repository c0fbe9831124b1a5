// Sharded units and models (fsdp/sharded_model.h), for brigade.fully_shard.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_SHARDING_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_SHARDING_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_sharding(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_SHARDING_H_
