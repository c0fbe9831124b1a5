// Functions that add one part each to the extension module brigade._C.

#ifndef BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_
#define BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_

#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace brigade {

using NoGil = py::call_guard<py::gil_scoped_release>;

// The destructor, which waits for callbacks that may acquire the GIL, runs
// without it.
template <typename T>
std::shared_ptr<T> destroyed_without_gil(std::unique_ptr<T> object) {
  return {object.release(), [](T* owned) {
            const py::gil_scoped_release no_gil;
            delete owned;
          }};
}

void register_checkpoints(py::module_& module);
void register_functions(py::module_& module);
void register_reducer(py::module_& module);
void register_sharding(py::module_& module);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REGISTRATIONS_H_
