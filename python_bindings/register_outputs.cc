#include "brigade/python_bindings/register_outputs.h"

#include <vector>

#include "brigade/hooks/output_tie.h"

namespace brigade {

void register_outputs(py::module_& module) {
  module.def(
      "tie_outputs",
      [](const std::vector<at::Tensor>& outputs, bool copies) {
        return tie_outputs(outputs, copies);
      },
      py::arg("outputs"), py::arg("copies") = true,
      py::call_guard<py::gil_scoped_release>(),
      "Stand-ins for tensors: a backward from some of them goes through all, "
      "so "
      "that with find_unused_parameters the loss may leave outputs out (the "
      "wrapper's forward does it itself). copies=False: they share the "
      "outputs' "
      "memory, and must not be changed in place. One backward per forward.");
}

}  // namespace brigade
