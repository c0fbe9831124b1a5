#include "brigade/python_bindings/module_walk.h"

#include <utility>

#include "absl/container/flat_hash_set.h"

namespace brigade {
namespace {

py::object torchs_module_class() {
  return py::module_::import("torch.nn").attr("Module");
}

// Runs ahead of a walk through a large dictionary.
class Prefetch {
 public:
  explicit Prefetch(py::handle dict) : dict_(dict) {
    if (PyDict_GET_SIZE(dict_.ptr()) <= kAhead) is_over_ = true;
    for (Py_ssize_t i = 0; i < kAhead && !is_over_; ++i) next();
  }

  void next() {
    if (is_over_) return;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    is_over_ = PyDict_Next(dict_.ptr(), &position_, &key, &value) == 0;
    __builtin_prefetch(key, /*write=*/1);
    __builtin_prefetch(value, /*write=*/1);
  }

 private:
  static constexpr Py_ssize_t kAhead = 12;

  const py::handle dict_;
  Py_ssize_t position_ = 0;
  bool is_over_ = false;
};

class Walk {
 public:
  void visit(std::string name, py::handle module) {
    if (has_own_walk_(module)) {
      visit_as_told(name, module);
      return;
    }
    if (!seen_.insert(module.ptr()).second) return;
    const size_t position = found_.size();
    add(std::move(name), module);
    const py::object submodules = found_[position].submodules;
    for_each_registered(submodules, [&](py::handle child, py::handle module) {
      visit(joined_name(found_[position].name, child), module);
    });
  }

  std::vector<NamedModule> take() { return std::move(found_); }

 private:
  void add(std::string name, py::handle module) {
    found_.push_back({.name = std::move(name),
                      .module = py::reinterpret_borrow<py::object>(module),
                      .parameters = table_of(module, Table::kParameters),
                      .submodules = table_of(module, Table::kModules)});
  }

  void visit_as_told(const std::string& name, py::handle module) {
    py::set memo;
    for (const NamedModule& each : found_) memo.add(each.module);
    for (py::handle pair : module.attr("named_modules")(memo, name)) {
      const auto entry = py::cast<py::tuple>(pair);
      const py::object submodule = entry[1];
      if (!seen_.insert(submodule.ptr()).second) continue;
      add(std::string(text_of(entry[0])), submodule);
    }
  }

  ClassCheck has_own_walk_ = overrides("named_modules");
  absl::flat_hash_set<PyObject*> seen_;
  std::vector<NamedModule> found_;
};

}  // namespace

std::string_view text_of(py::handle text) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (utf8 == nullptr) throw py::error_already_set();
  return {utf8, static_cast<size_t>(size)};
}

std::string joined_name(std::string_view module, py::handle name) {
  std::string joined;
  join_name(module, name, joined);
  return joined;
}

void join_name(std::string_view module, py::handle name, std::string& joined) {
  joined = module;
  if (!module.empty()) joined += '.';
  joined += text_of(name);
}

size_t size_of(py::handle table) {
  return PyDict_Check(table.ptr()) ? PyDict_GET_SIZE(table.ptr()) : 0;
}

py::object table_of(py::handle module, Table table) {
  static PyObject* const names[] = {PyUnicode_InternFromString("_parameters"),
                                    PyUnicode_InternFromString("_buffers"),
                                    PyUnicode_InternFromString("_modules")};
  return module.attr(py::handle(names[static_cast<size_t>(table)]));
}

void for_each_registered(
    py::handle table, absl::FunctionRef<void(py::handle, py::handle)> visit) {
  // A subclass may have an order of its own.
  if (PyDict_CheckExact(table.ptr())) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    Prefetch ahead(table);
    while (PyDict_Next(table.ptr(), &position, &name, &value) != 0) {
      ahead.next();
      if (value != Py_None) visit(name, value);
    }
    return;
  }
  for (py::handle pair : table.attr("items")()) {
    const auto entry = py::cast<py::tuple>(pair);
    const py::object name = entry[0];
    const py::object value = entry[1];
    if (!value.is_none()) visit(name, value);
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
