#include <c10/util/Exception.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "brigade/bucket_sweep/sweep.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/python_bindings/registrations.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/simulation/simulation_json.h"

namespace brigade {
namespace {

void require_agreement_in_python(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& kind, const std::vector<std::string>& items,
    const std::string& failure) {
  const absl::Status status =
      failure.empty() ? absl::OkStatus() : absl::InvalidArgumentError(failure);
  try {
    require_agreement(group, kind, items, status);
  } catch (const c10::ValueError& error) {
    TORCH_CHECK(false, error.what_without_backtrace());
  }
}

// Visits the values of the tables until `visit` returns false; returns false
// then.
bool for_each_value(const py::list& tables,
                    absl::FunctionRef<bool(PyObject*)> visit) {
  for (py::handle table : tables) {
    if (PyDict_Check(table.ptr())) {
      PyObject* value = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(table.ptr(), &position, nullptr, &value) != 0) {
        if (!visit(value)) return false;
      }
      continue;
    }
    // TorchScript modules have tables that are not dicts.
    for (py::handle value : table.attr("values")()) {
      if (!visit(value.ptr())) return false;
    }
  }
  return true;
}

py::list entries_of(const py::list& tables) {
  py::list entries;
  for_each_value(tables, [&](PyObject* value) {
    entries.append(py::handle(value));
    return true;
  });
  return entries;
}

bool has_entries(const py::list& tables, const py::list& entries) {
  const Py_ssize_t count = PyList_GET_SIZE(entries.ptr());
  Py_ssize_t next = 0;
  const bool all_known = for_each_value(tables, [&](PyObject* value) {
    return next < count && PyList_GET_ITEM(entries.ptr(), next++) == value;
  });
  return all_known && next == count;
}

using Named = std::vector<std::tuple<std::string, at::Tensor, bool>>;

std::vector<RegisteredParameter> registered(const Named& named) {
  std::vector<RegisteredParameter> parameters;
  for (const auto& [name, tensor, stands_in] : named) {
    parameters.push_back(
        {.name = name, .tensor = tensor, .stands_in = stands_in});
  }
  return parameters;
}

// Returns the figures as JSON.
std::string sweep_in_python(const std::string& name,
                            const std::vector<at::Tensor>& parameters,
                            const std::vector<std::string>& parameter_names,
                            const std::function<at::Tensor()>& loss,
                            const std::vector<std::string>& sizes,
                            const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            int64_t rounds, int64_t steps,
                            bool find_unused_parameters, bool static_graph,
                            bool gradient_as_bucket_view,
                            const std::function<void(std::string)>& after_round,
                            const std::string& resumed) {
  SweepOptions options{
      .sizes = sizes,
      .rounds = rounds,
      .steps = steps,
      .reducer = {.parameter_names = parameter_names,
                  .find_unused_parameters = find_unused_parameters,
                  .static_graph = static_graph,
                  .gradient_as_bucket_view = gradient_as_bucket_view},
      .after_round = [&](const SweepSamples& samples) {
        after_round(to_json(name, samples));
      }};
  if (!resumed.empty()) {
    options.resumed = std::make_shared<SweepSamples>(
        value_or_throw(samples_from_json(resumed)));
  }
  return to_json(name, measure(parameters, loss, group, options));
}

std::string sweep_table(const std::string& name, const std::string& figures) {
  return to_text(name, summarize(value_or_throw(samples_from_json(figures))));
}

}  // namespace

void register_functions(py::module_& module) {
  module.def(
      "require_agreement", &require_agreement_in_python, py::arg("group"),
      py::arg("kind"), py::arg("items"), py::arg("failure") = "", NoGil(),
      "See comm/agreement.h. Raises RuntimeError; `failure`: an error's text.");
  module.def("suggest_control_device", &suggest_control_device,
             "See comm/group/group_info.h.");
  module.def(
      "describe_tensor", &describe_tensor,
      "Returns name, dtype, shape and device type as text, and the strides "
      "of a tensor that is not contiguous.");
  module.def("entries_of", &entries_of,
             "Returns the values of a module's parameter and child tables, in "
             "one list.");
  module.def("has_entries", &has_entries,
             "Returns True if entries_of(tables) would return these objects.");
  module.def(
      "check_parameters",
      [](const std::string& module_name, const Named& present,
         const Named& reduced, const Named& frozen,
         std::vector<at::Tensor> others, std::vector<std::string> ignored) {
        return check_parameters(module_name,
                                {.reduced = registered(reduced),
                                 .frozen = registered(frozen),
                                 .others = std::move(others),
                                 .ignored = std::move(ignored)},
                                registered(present));
      },
      py::arg("module_name"), py::kw_only(), py::arg("present"),
      py::arg("reduced"), py::arg("frozen"), py::arg("others"),
      py::arg("ignored"),
      "See reducer/parameter_table.h. Parameters are (name, tensor, whether "
      "the tensor stands in for a parameter).");
  py::class_<OrderedAllReduce>(
      module, "OrderedAllReduce",
      "Sums of a group in rank order. Make it on all ranks in the same order.")
      .def(py::init<const c10::intrusive_ptr<c10d::ProcessGroup>&>())
      .def(
          "run",
          [](OrderedAllReduce& self, const at::Tensor& tensor) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                self.run(tensor, /*scale=*/1));
          },
          NoGil(),
          "Collective. Replaces the tensor by its sum over ranks; returns a "
          "future.");
  module.def("sweep", &sweep_in_python, py::arg("name"), py::arg("parameters"),
             py::arg("parameter_names"), py::arg("loss"), py::arg("sizes"),
             py::arg("group"), py::kw_only(), py::arg("rounds"),
             py::arg("steps"), py::arg("find_unused_parameters") = false,
             py::arg("static_graph") = false,
             py::arg("gradient_as_bucket_view") = false, py::arg("after_round"),
             py::arg("resumed") = "", NoGil(),
             "Collective. Returns all figures as JSON; see "
             "bucket_sweep/sweep.h. `after_round` receives those so far, "
             "`resumed` are those of an interrupted sweep.");
  module.def(
      "simulate",
      [](const std::string& request) {
        return value_or_throw(simulate_json(request));
      },
      NoGil(),
      "Returns the simulated step of a request; both are JSON. See "
      "simulation/simulation_json.h.");
  module.def("sweep_table", &sweep_table,
             "Returns the table of sweep()'s figures.");
}

}  // namespace brigade
