#include <pybind11/functional.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/bucket_sweep/sweep.h"
#include "brigade/python_bindings/registrations.h"

namespace brigade {
namespace {

// Returns the table, and the figures as JSON.
std::pair<std::string, std::string> sweep_in_python(
    const std::string& name, const std::vector<at::Tensor>& parameters,
    const std::vector<std::string>& parameter_names,
    const std::function<at::Tensor()>& loss,
    const std::vector<std::string>& sizes,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t rounds,
    int64_t steps, bool find_unused_parameters, bool static_graph,
    bool gradient_as_bucket_view) {
  const SweepSummary summary =
      sweep(parameters, loss, group,
            {.sizes = sizes,
             .rounds = rounds,
             .steps = steps,
             .reducer = {.parameter_names = parameter_names,
                         .find_unused_parameters = find_unused_parameters,
                         .static_graph = static_graph,
                         .gradient_as_bucket_view = gradient_as_bucket_view}});
  return {to_text(name, summary), to_json(name, summary)};
}

}  // namespace

void register_bench(py::module_& module) {
  module.def("sweep", &sweep_in_python, py::arg("name"), py::arg("parameters"),
             py::arg("parameter_names"), py::arg("loss"), py::arg("sizes"),
             py::arg("group"), py::kw_only(), py::arg("rounds"),
             py::arg("steps"), py::arg("find_unused_parameters") = false,
             py::arg("static_graph") = false,
             py::arg("gradient_as_bucket_view") = false,
             py::call_guard<py::gil_scoped_release>(),
             "Collective. Returns the table, and all figures as JSON; see "
             "bucket_sweep/sweep.h.");
}

}  // namespace brigade
