#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "brigade/python_bindings/registrations.h"
#include "brigade/reducer/parameter_changes.h"

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

const at::Tensor& in_cpp(py::handle tensor) {
  TORCH_CHECK_TYPE(THPVariable_Check(tensor.ptr()),
                   "brigade: expected a tensor, got ",
                   std::string(py::repr(tensor)), ".");
  return THPVariable_Unpack(tensor.ptr());
}

bool check_named_parameters(const std::string& module_name,
                            const py::dict& present, const py::list& reduced,
                            const std::vector<std::string>& names,
                            const py::list& frozen, const py::list& others,
                            std::vector<std::string> ignored) {
  WrappedParameters wrapped;
  wrapped.ignored = std::move(ignored);
  for (size_t i = 0; i < names.size(); ++i) {
    const py::handle tensor = reduced[i];
    if (!tensor.is_none()) {
      wrapped.reduced.push_back({names[i], in_cpp(tensor)});
    }
  }
  absl::flat_hash_set<PyObject*> known;
  for (py::handle other : others) {
    known.insert(other.ptr());
    wrapped.others.push_back(in_cpp(other));
  }
  absl::flat_hash_set<PyObject*> frozen_ones;
  for (py::handle each : frozen) frozen_ones.insert(each.ptr());
  const py::object parameter_type =
      py::module_::import("torch.nn").attr("Parameter");
  std::vector<RegisteredParameter> parameters;
  for (const auto& [name, tensor] : present) {
    parameters.push_back(
        {.name = py::cast<std::string>(name),
         .tensor = in_cpp(tensor),
         .stands_in = !known.contains(tensor.ptr()) &&
                      !py::isinstance(tensor, parameter_type)});
    if (frozen_ones.contains(tensor.ptr())) {
      wrapped.frozen.push_back(parameters.back());
    }
  }
  return check_parameters(module_name, wrapped, parameters);
}

}  // namespace

void register_module_entries(py::module_& module) {
  module.def("entries_of", &entries_of, py::arg("tables"),
             "What is registered in tables of a module, one list for all.");
  module.def("has_entries", &has_entries, py::arg("tables"), py::arg("entries"),
             "Whether entries_of() would give that list.");
  module.def("check_parameters", &check_named_parameters,
             py::arg("module_name"), py::kw_only(), py::arg("present"),
             py::arg("reduced"), py::arg("names"), py::arg("frozen"),
             py::arg("others"), py::arg("ignored"),
             "Raises RuntimeError if what is present is not what was wrapped: "
             "parameters that require gradients were added, replaced, removed "
             "or unfrozen. None in `reduced` stands for one that may change; "
             "`others` may be there. False: something stands in for "
             "parameters, so it will change again.");
}

}  // namespace brigade
