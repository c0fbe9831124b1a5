// The submodules of a Python module, and what each has registered: what
// torch.nn.Module's own methods find, which make a generator per module and a
// tuple per name.
//
// Thread safety: the caller holds the GIL.

#ifndef BRIGADE_PYTHON_BINDINGS_MODULE_WALK_H_
#define BRIGADE_PYTHON_BINDINGS_MODULE_WALK_H_

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"

namespace brigade {

struct NamedModule {
  std::string name;  // "encoder.0"; empty for the root
  py::object module;
  // Its tables.
  py::object parameters;
  py::object submodules;
};

// As root.named_modules(): each module once, parents first.
std::vector<NamedModule> named_modules(py::handle root);

// Where a module has registered something itself.
enum class Table { kParameters, kBuffers, kModules };

py::object table_of(py::handle module, Table table);

// How many entries a table has, None among them; 0 if it won't say.
size_t size_of(py::handle table);

// Calls `visit` with name and value of what is registered in a table, but for
// None.
void for_each_registered(py::handle table,
                         absl::FunctionRef<void(py::handle, py::handle)> visit);

// UTF-8, valid while `text` lives. Errors: what Python raises if it is no str.
std::string_view text_of(py::handle text);

// `name` in the module of that name.
std::string joined_name(std::string_view module, py::handle name);
void join_name(std::string_view module, py::handle name, std::string& joined);

// Something that is true or false of a class, asked of its instances.
class ClassCheck {
 public:
  explicit ClassCheck(std::function<bool(py::handle type)> check);

  bool operator()(py::handle instance);

 private:
  std::function<bool(py::handle)> check_;
  absl::flat_hash_map<PyObject*, bool> known_;
  PyObject* last_ = nullptr;  // modules of one class come in rows
  bool answer_ = false;
};

// Of classes that answer by `method` other than torch.nn.Module.
ClassCheck overrides(const char* method);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_MODULE_WALK_H_
