// The extension module brigade._C.

#include <torch/csrc/utils/pybind.h>

#include "brigade/python_bindings/python_hooks.h"
#include "brigade/python_bindings/registrations.h"

PYBIND11_MODULE(_C, module) {
  module.def(
      "version", [] { return BRIGADE_VERSION; }, "Returns brigade's version.");
  // Registers types and exception translators that the functions below use.
  py::module_::import("torch._C");
  brigade::register_functions(module);
  brigade::register_reducer(module);
  brigade::register_sharding(module);
  brigade::register_checkpoints(module);
  py::module_::import("atexit").attr("register")(py::cpp_function(
      &brigade::wait_at_exit, py::call_guard<py::gil_scoped_release>()));
}
