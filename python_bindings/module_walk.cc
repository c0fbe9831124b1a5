#include "brigade/python_bindings/module_walk.h"

#include <utility>

#include "absl/container/flat_hash_set.h"

namespace brigade {
namespace {

std::string_view text_of(py::handle name) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (text == nullptr) throw py::error_already_set();
  return {text, static_cast<size_t>(size)};
}

py::object torchs_module_class() {
  return py::module_::import("torch.nn").attr("Module");
}

class Walk {
 public:
  void visit(std::string name, py::handle module) {
    if (has_own_walk_(module)) {
      visit_as_told(name, module);
      return;
    }
    if (!seen_.insert(module.ptr()).second) return;
    const size_t position = found_.size();
    found_.push_back(
        {std::move(name), py::reinterpret_borrow<py::object>(module)});
    for_each_registered(module, Table::kModules,
                        [&](std::string_view child, py::handle submodule) {
                          visit(joined_name(found_[position].name, child),
                                submodule);
                        });
  }

  std::vector<NamedModule> take() { return std::move(found_); }

 private:
  void visit_as_told(const std::string& name, py::handle module) {
    py::set memo;
    for (const NamedModule& each : found_) memo.add(each.module);
    for (py::handle pair : module.attr("named_modules")(memo, name)) {
      const auto entry = py::cast<py::tuple>(pair);
      py::object submodule = entry[1];
      if (!seen_.insert(submodule.ptr()).second) continue;
      found_.push_back({std::string(text_of(entry[0])), std::move(submodule)});
    }
  }

  ClassCheck has_own_walk_ = overrides("named_modules");
  absl::flat_hash_set<PyObject*> seen_;
  std::vector<NamedModule> found_;
};

}  // namespace

std::string joined_name(std::string_view prefix, std::string_view name) {
  std::string joined(prefix);
  if (!prefix.empty()) joined += '.';
  return joined.append(name);
}

py::object table_of(py::handle module, Table table) {
  static PyObject* const names[] = {PyUnicode_InternFromString("_parameters"),
                                    PyUnicode_InternFromString("_buffers"),
                                    PyUnicode_InternFromString("_modules")};
  return module.attr(py::handle(names[static_cast<size_t>(table)]));
}

void for_each_registered(
    py::handle module, Table table,
    absl::FunctionRef<void(std::string_view, py::handle)> visit) {
  const py::object entries = table_of(module, table);
  // A subclass may have an order of its own.
  if (PyDict_CheckExact(entries.ptr())) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(entries.ptr(), &position, &name, &value) != 0) {
      if (value != Py_None) visit(text_of(name), value);
    }
    return;
  }
  for (py::handle pair : entries.attr("items")()) {
    const auto entry = py::cast<py::tuple>(pair);
    const py::object name = entry[0];
    const py::object value = entry[1];
    if (!value.is_none()) visit(text_of(name), value);
  }
}

ClassCheck::ClassCheck(std::function<bool(py::handle)> check)
    : check_(std::move(check)) {}

bool ClassCheck::operator()(py::handle instance) {
  const py::handle type = py::type::handle_of(instance);
  if (type.ptr() == last_) return answer_;
  const auto [entry, is_new] = known_.try_emplace(type.ptr(), false);
  if (is_new) entry->second = check_(type);
  last_ = type.ptr();
  answer_ = entry->second;
  return answer_;
}

ClassCheck overrides(const char* method) {
  const py::object torchs = torchs_module_class().attr(method);
  return ClassCheck([method, torchs](py::handle type) {
    return py::getattr(type, method).ptr() != torchs.ptr();
  });
}

std::vector<NamedModule> named_modules(py::handle root) {
  Walk walk;
  walk.visit("", root);
  return walk.take();
}

}  // namespace brigade
