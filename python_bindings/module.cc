// The extension module brigade._C.

#include <torch/csrc/utils/pybind.h>

#include "brigade/python_bindings/exit_wait.h"
#include "brigade/python_bindings/register_agreement.h"
#include "brigade/python_bindings/register_checkpoints.h"
#include "brigade/python_bindings/register_hooks.h"
#include "brigade/python_bindings/register_logger.h"
#include "brigade/python_bindings/register_module_scan.h"
#include "brigade/python_bindings/register_outputs.h"
#include "brigade/python_bindings/register_recording_group.h"
#include "brigade/python_bindings/register_reducer.h"
#include "brigade/python_bindings/register_sharding.h"

PYBIND11_MODULE(_C, module) {
  module.def(
      "version", [] { return BRIGADE_VERSION; },
      "Of brigade, as CMakeLists.txt has it.");
  // Its types and exception translators are used below.
  py::module_::import("torch._C");
  brigade::register_agreement(module);
  brigade::register_module_scan(module);
  brigade::register_reducer(module);
  brigade::register_logger(module);
  brigade::register_hooks(module);
  brigade::register_outputs(module);
  brigade::register_recording_group(module);
  brigade::register_sharding(module);
  brigade::register_checkpoints(module);
  py::module_::import("atexit").attr("register")(py::cpp_function(
      &brigade::wait_at_exit, py::call_guard<py::gil_scoped_release>()));
}
