#include "brigade/python_bindings/module_scan.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "brigade/hooks/prefetch.h"
#include "brigade/reducer/parameter_changes.h"

namespace brigade {
namespace {

ClassCheck is_kind_of(py::object base) {
  return ClassCheck([base = std::move(base)](py::handle type) {
    return PyObject_IsSubclass(type.ptr(), base.ptr()) == 1;
  });
}

// Python's tensors seen from C++, for a fraction of what the binding of one
// argument costs.
class Tensors {
 public:
  const at::Tensor& operator[](py::handle tensor) {
    TORCH_CHECK_TYPE(is_tensor_(tensor), "brigade: expected a tensor, got ",
                     std::string(py::repr(tensor)), ".");
    return THPVariable_Unpack(tensor.ptr());
  }

  // What a pass that asks each of thousands will come to soon.
  void prefetch(py::handle tensor) {
    if (!is_tensor_(tensor)) return;
    brigade::prefetch(THPVariable_Unpack(tensor.ptr()).unsafeGetTensorImpl());
  }

 private:
  ClassCheck is_tensor_ =
      is_kind_of(py::reinterpret_borrow<py::object>(THPVariableClass));
};

// Far enough for a tensor to come while others are looked at.
constexpr ptrdiff_t kTensorAhead = 8;

void set_item(const py::dict& dict, const std::string& key, py::handle value) {
  if (PyDict_SetItem(dict.ptr(), py::str(key).ptr(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

class ReducedParametersBuilder {
 public:
  // `numbers`: of tensors.
  ReducedParametersBuilder(
      const py::set& ignored,
      const absl::flat_hash_map<PyObject*, size_t>& numbers)
      : ignored_(ignored),
        ignores_some_(!ignored.empty()),
        numbers_(numbers),
        places_(numbers.size()) {
    reduced_.names.reserve(numbers.size());
    reduced_.tensors_in_cpp.reserve(numbers.size());
    reduced_.expect_sparse.reserve(numbers.size());
  }

  // A module that answers in its own way may have tensors of its own.
  size_t number_of(const py::object& tensor) {
    if (const auto known = numbers_.find(tensor.ptr());
        known != numbers_.end()) {
      return known->second;
    }
    const auto [entry, is_new] =
        others_.try_emplace(tensor.ptr(), places_.size());
    if (is_new) {
      places_.emplace_back();
      kept_.append(tensor);
    }
    return entry->second;
  }

  // `module` is a number: of several names in one module, the first counts.
  // Whoever ignores a parameter of the root calls it ".weight", as torch's
  // DistributedDataParallel does there.
  void add(std::string_view module_name, py::handle own_name,
           const py::object& tensor, const at::Tensor& in_cpp, size_t number,
           size_t module, bool is_sparse) {
    Place& place = places_[number];
    if (std::exchange(place.last_module, module) == module) return;
    join_name(module_name, own_name, name_);
    if (ignores_some_ &&
        ignored_.contains(py::str(module_name.empty() ? "." + name_ : name_))) {
      return;
    }
    if (place.position != kNone) {
      reduced_.names.set(place.position, name_);
      return;
    }
    place.position = reduced_.names.size();
    reduced_.tensors.append(tensor);
    reduced_.tensors_in_cpp.push_back(in_cpp);
    reduced_.names.push_back(name_);
    reduced_.expect_sparse.push_back(is_sparse);
  }

  ReducedParameters take() { return std::move(reduced_); }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  struct Place {
    size_t last_module = kNone;
    size_t position = kNone;  // in the lists
  };

  const py::set& ignored_;
  const bool ignores_some_;
  const absl::flat_hash_map<PyObject*, size_t>& numbers_;
  absl::flat_hash_map<PyObject*, size_t> others_;  // beside these
  py::list kept_;                                  // theirs
  std::vector<Place> places_;                      // by number
  std::string name_;                               // room for one
  ReducedParameters reduced_;
};

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

}  // namespace

ModuleScan::ModuleScan(py::object module)
    : root_(std::move(module)), modules_(named_modules(root_)) {
  size_t num_entries = 0;
  for (const NamedModule& each : modules_) {
    num_entries += size_of(each.parameters);
  }
  parameters_.reserve(num_entries);
  numbers_.reserve(num_entries);
  for (size_t m = 0; m < modules_.size(); ++m) {
    for_each_registered(
        modules_[m].parameters, [&](py::handle name, py::handle tensor) {
          const auto number =
              numbers_.try_emplace(tensor.ptr(), numbers_.size()).first->second;
          parameters_.push_back(
              {.own_name = py::reinterpret_borrow<py::object>(name),
               .tensor = py::reinterpret_borrow<py::object>(tensor),
               .module = m,
               .number = number});
        });
  }
}

std::string ModuleScan::name_of(const Parameter& parameter) const {
  return joined_name(modules_[parameter.module].name, parameter.own_name);
}

void ModuleScan::for_each_tensor(
    absl::FunctionRef<void(const Parameter&)> visit) const {
  size_t next = 0;
  for (const Parameter& each : parameters_) {
    if (each.number != next) continue;
    visit(each);
    ++next;
  }
}

py::dict ModuleScan::named_parameters() const {
  if (overrides("named_parameters")(root_)) {
    return py::dict(root_.attr("named_parameters")());
  }
  py::dict named;
  for_each_tensor([&](const Parameter& parameter) {
    set_item(named, name_of(parameter), parameter.tensor);
  });
  return named;
}

py::dict ModuleScan::named_buffers() const {
  if (overrides("named_buffers")(root_)) {
    return py::dict(root_.attr("named_buffers")());
  }
  py::dict named;
  absl::flat_hash_set<PyObject*> seen;
  for (const NamedModule& in : modules_) {
    for_each_registered(table_of(in.module, Table::kBuffers),
                        [&](py::handle name, py::handle tensor) {
                          if (!seen.insert(tensor.ptr()).second) return;
                          set_item(named, joined_name(in.name, name), tensor);
                        });
  }
  return named;
}

py::list ModuleScan::parameters(const py::set& ignored) const {
  py::list parameters;
  if (ignored.empty() && !overrides("named_parameters")(root_)) {
    py::list all(numbers_.size());
    for_each_tensor([&](const Parameter& parameter) {
      PyList_SET_ITEM(all.ptr(), parameter.number,
                      parameter.tensor.inc_ref().ptr());
    });
    return all;
  }
  for (const auto& [name, tensor] : named_parameters()) {
    if (!ignored.contains(name)) parameters.append(tensor);
  }
  return parameters;
}

ReducedParameters ModuleScan::reduced_parameters(const py::set& ignored) {
  const py::module_ torchs = py::module_::import("torch.nn");
  ClassCheck is_embedding = is_kind_of(
      py::make_tuple(torchs.attr("Embedding"), torchs.attr("EmbeddingBag")));
  ClassCheck names_its_own = overrides("named_parameters");
  Tensors in_cpp;
  ReducedParametersBuilder reduced(ignored, numbers_);
  requires_grad_.resize(numbers_.size());
  auto parameter = parameters_.begin();
  for (size_t m = 0; m < modules_.size(); ++m) {
    const NamedModule& in = modules_[m];
    const bool is_sparse =
        is_embedding(in.module) && py::cast<bool>(in.module.attr("sparse"));
    const bool is_asked = names_its_own(in.module);
    for (; parameter != parameters_.end() && parameter->module == m;
         ++parameter) {
      if (is_asked) continue;
      if (parameters_.end() - parameter > kTensorAhead) {
        in_cpp.prefetch(parameter[kTensorAhead].tensor);
        __builtin_prefetch(parameter[kTensorAhead].own_name.ptr());
      }
      const at::Tensor& tensor = in_cpp[parameter->tensor];
      const bool requires_grad = tensor.requires_grad();
      requires_grad_[parameter->number] = requires_grad;
      if (!requires_grad) continue;
      reduced.add(in.name, parameter->own_name, parameter->tensor, tensor,
                  parameter->number, m, is_sparse);
    }
    if (!is_asked) continue;
    for (py::handle pair :
         in.module.attr("named_parameters")(py::arg("recurse") = false)) {
      const auto entry = py::cast<py::tuple>(pair);
      const py::object name = entry[0];
      const py::object tensor = entry[1];
      if (!in_cpp[tensor].requires_grad()) continue;
      reduced.add(in.name, name, tensor, in_cpp[tensor],
                  reduced.number_of(tensor), m, is_sparse);
    }
  }
  return reduced.take();
}

py::set ModuleScan::classes() const {
  absl::flat_hash_set<PyObject*> classes;
  for (const NamedModule& each : modules_) {
    classes.insert(py::type::handle_of(each.module).ptr());
  }
  py::set found;
  for (PyObject* each : classes) found.add(py::handle(each));
  return found;
}

py::list ModuleScan::frozen_parameters() {
  Tensors in_cpp;
  py::list frozen;
  requires_grad_.resize(numbers_.size());
  for_each_tensor([&](const Parameter& parameter) {
    std::optional<bool>& requires_grad = requires_grad_[parameter.number];
    if (!requires_grad)
      requires_grad = in_cpp[parameter.tensor].requires_grad();
    if (!*requires_grad) frozen.append(parameter.tensor);
  });
  return frozen;
}

py::list ModuleScan::tables() const {
  py::list tables;
  for (const NamedModule& each : modules_) {
    tables.append(each.parameters);
    tables.append(each.submodules);
  }
  return tables;
}

py::list one_per_device(const py::list& tensors) {
  Tensors in_cpp;
  std::vector<at::Device> devices;
  py::list firsts;
  const Py_ssize_t count = PyList_GET_SIZE(tensors.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + kTensorAhead < count) {
      in_cpp.prefetch(PyList_GET_ITEM(tensors.ptr(), i + kTensorAhead));
    }
    const py::handle tensor = PyList_GET_ITEM(tensors.ptr(), i);
    const at::Device device = in_cpp[tensor].device();
    if (std::ranges::find(devices, device) != devices.end()) continue;
    devices.push_back(device);
    firsts.append(tensor);
  }
  return firsts;
}

bool are_exactly(const py::list& objects, py::handle type) {
  for (py::handle object : objects) {
    if (py::type::handle_of(object).ptr() != type.ptr()) return false;
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

bool check_named_parameters(const std::string& module_name,
                            const py::dict& present, const py::list& reduced,
                            const std::vector<std::string>& names,
                            const py::list& frozen, const py::list& others,
                            std::vector<std::string> ignored) {
  Tensors in_cpp;
  WrappedParameters wrapped{.ignored = std::move(ignored)};
  for (size_t i = 0; i < names.size(); ++i) {
    const py::handle tensor = reduced[i];
    if (!tensor.is_none()) {
      wrapped.reduced.push_back({names[i], in_cpp[tensor]});
    }
  }
  absl::flat_hash_set<PyObject*> known;
  for (py::handle other : others) {
    known.insert(other.ptr());
    wrapped.others.push_back(in_cpp[other]);
  }
  absl::flat_hash_set<PyObject*> frozen_ones;
  for (py::handle each : frozen) frozen_ones.insert(each.ptr());
  const py::object parameter_type =
      py::module_::import("torch.nn").attr("Parameter");
  std::vector<RegisteredParameter> parameters;
  for (const auto& [name, tensor] : present) {
    parameters.push_back(
        {.name = py::cast<std::string>(name),
         .tensor = in_cpp[tensor],
         .stands_in = !known.contains(tensor.ptr()) &&
                      !py::isinstance(tensor, parameter_type)});
    if (frozen_ones.contains(tensor.ptr())) {
      wrapped.frozen.push_back(parameters.back());
    }
  }
  return check_parameters(module_name, wrapped, parameters);
}

}  // namespace brigade
