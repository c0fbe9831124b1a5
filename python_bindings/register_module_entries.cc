#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "brigade/python_bindings/registrations.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {
namespace {

// Stops, and returns false, where `visit` does.
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
    // TorchScript's modules have tables of their own kind, over memory of C++.
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

}  // namespace

void register_module_entries(py::module_& module) {
  module.def("entries_of", &entries_of, py::arg("tables"),
             "What is registered in tables of a module, one list for all.");
  module.def("has_entries", &has_entries, py::arg("tables"), py::arg("entries"),
             "Whether entries_of() would give that list.");
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
      "Raises RuntimeError if parameters that require gradients were added, "
      "replaced, removed or unfrozen. Each parameter with its name and whether "
      "it stands in for another one; `others` may be there. False: one stands "
      "in, so parameters will change again.");
}

}  // namespace brigade
