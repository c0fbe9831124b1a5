// Binds TorchReducer as brigade.Reducer.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_REDUCER_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_REDUCER_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_reducer(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_REDUCER_H_
