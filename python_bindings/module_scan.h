// What a Python module holds, from one walk over its submodules.
//
// Thread safety: the caller holds the GIL.

#ifndef BRIGADE_PYTHON_BINDINGS_MODULE_SCAN_H_
#define BRIGADE_PYTHON_BINDINGS_MODULE_SCAN_H_

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "brigade/python_bindings/module_walk.h"
#include "brigade/python_bindings/reduced_parameters.h"

namespace brigade {

class ModuleScan {
 public:
  explicit ModuleScan(py::object module);

  // As dict(module.named_parameters()), dict(module.named_buffers()).
  py::dict named_parameters() const;
  py::dict named_buffers() const;

  // Those of named_parameters() whose names are not ignored.
  py::list parameters(const py::set& ignored) const;

  // Those that require a gradient and whose names are not ignored, as torch's
  // DistributedDataParallel has them: each once, in the order of registration;
  // a shared one by its name in the last module that has it.
  ReducedParameters reduced_parameters(const py::set& ignored);

  // Of the module and its submodules.
  py::set classes() const;

  // Those that require no gradient, each once.
  py::list frozen_parameters();

  // The tables in which parameters and submodules are registered.
  py::list tables() const;

 private:
  struct Parameter {
    py::object own_name;  // in its module
    py::object tensor;
    size_t module;  // index into modules_
    size_t number;  // of the tensor, in order of first appearance
  };

  std::string name_of(const Parameter& parameter) const;

  // Calls `visit` with each tensor once, by the first of its names.
  void for_each_tensor(absl::FunctionRef<void(const Parameter&)> visit) const;

  py::object root_;
  std::vector<NamedModule> modules_;   // parents first
  std::vector<Parameter> parameters_;  // by module; a shared one several times
  absl::flat_hash_map<PyObject*, size_t> numbers_;  // of tensors
  // By number, whether a tensor requires a gradient; null: not asked yet.
  std::vector<std::optional<bool>> requires_grad_;
};

// The first of the tensors on each device.
py::list one_per_device(const py::list& tensors);

// Whether all are of this class, and not of one derived from it.
bool are_exactly(const py::list& objects, py::handle type);

// What is registered in tables of a module, one list for all.
py::list entries_of(const py::list& tables);

// Whether entries_of(tables) would give that list.
bool has_entries(const py::list& tables, const py::list& entries);

// As of reducer/parameter_changes.h. `present`: named_parameters(). None in
// `reduced`, whose names are `names`, stands for one that may change.
// `others`: all that may be there.
bool check_named_parameters(const std::string& module_name,
                            const py::dict& present, const py::list& reduced,
                            const std::vector<std::string>& names,
                            const py::list& frozen, const py::list& others,
                            std::vector<std::string> ignored);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_MODULE_SCAN_H_
