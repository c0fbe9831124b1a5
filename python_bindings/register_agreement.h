// Binds what compares ranks: require_agreement(), describe_tensor().

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTER_AGREEMENT_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTER_AGREEMENT_H_

#include <torch/csrc/utils/pybind.h>

namespace brigade {

void register_agreement(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTER_AGREEMENT_H_
