#include "brigade/python_bindings/register_logger.h"

#include <memory>

#include "brigade/python_bindings/logger.h"

namespace brigade {

void register_logger(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Logger, c10d::Logger, std::shared_ptr<Logger>>(
      module, "Logger",
      "Logging data of a brigade.Reducer; stands in for "
      "torch.distributed.Logger.")
      .def(py::init<const TorchReducer&>(), py::arg("reducer"),
           py::keep_alive<1, 2>())
      .def("set_construction_data_and_log", &Logger::set_construction_data,
           py::arg("module_name"), py::arg("device_ids"),
           py::arg("output_device"), py::arg("broadcast_buffers"),
           py::arg("has_sync_bn"), py::arg("static_graph"),
           py::call_guard<py::gil_scoped_release>())
      .def("set_runtime_stats_and_log", &Logger::sample_runtime,
           py::call_guard<py::gil_scoped_release>())
      .def("set_error_and_log", &Logger::set_error, py::arg("error"),
           py::call_guard<py::gil_scoped_release>())
      .def("_set_comm_hook_name", &Logger::set_comm_hook_name,
           py::arg("comm_hook"))
      .def("_set_static_graph", &Logger::set_static_graph)
      .def("_set_uneven_input_join", &Logger::set_uneven_input_join)
      .def("_get_ddp_logging_data", &Logger::data,
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace brigade
