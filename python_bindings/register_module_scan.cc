#include "brigade/python_bindings/register_module_scan.h"

#include <utility>
#include <vector>

#include "brigade/python_bindings/module_scan.h"
#include "brigade/python_bindings/reduced_parameters.h"

namespace brigade {

void register_module_scan(py::module_& module) {
  py::class_<ReducedParameters>(
      module, "ReducedParameters",
      "What a reducer is made of. For a moment, as ModuleScan.")
      .def(py::init([](py::list tensors, const NamesByIndex& names,
                       std::vector<bool> expect_sparse) {
             const size_t count = py::len(tensors);
             return ReducedParameters{
                 .tensors = std::move(tensors),
                 .tensors_in_cpp = {},
                 .names = names_of(names, count),
                 .expect_sparse = std::move(expect_sparse)};
           }),
           py::arg("tensors"), py::arg("names"), py::arg("expect_sparse"))
      .def_readonly("tensors", &ReducedParameters::tensors)
      .def_property_readonly(
          "names",
          [](const ReducedParameters& self) { return self.names.strings(); },
          "By tensor, without a dot before those of the root's own parameters.")
      .def_readonly("expect_sparse", &ReducedParameters::expect_sparse,
                    "By tensor.");
  py::class_<ModuleScan>(
      module, "ModuleScan",
      "What a module holds, from one walk over its submodules. Keeps all that "
      "it has found alive, out of the garbage collector's sight: for a moment.")
      .def(py::init<py::object>(), py::arg("module"))
      .def("named_parameters", &ModuleScan::named_parameters,
           "What dict(module.named_parameters()) gives.")
      .def("named_buffers", &ModuleScan::named_buffers,
           "What dict(module.named_buffers()) gives.")
      .def("parameters", &ModuleScan::parameters, py::arg("ignored"),
           "Those of named_parameters() whose names are not ignored.")
      .def("reduced_parameters", &ModuleScan::reduced_parameters,
           py::arg("ignored"),
           "Those that require a gradient and whose names are not ignored, as "
           "torch's DistributedDataParallel has them: each once, in the order "
           "of registration; a shared one by its last name.")
      .def("classes", &ModuleScan::classes,
           "Those of the module and its submodules.")
      .def("frozen_parameters", &ModuleScan::frozen_parameters,
           "Those that require no gradient, each once.")
      .def("tables", &ModuleScan::tables,
           "The tables in which parameters and submodules are registered.");
  module.def("one_per_device", &one_per_device, py::arg("tensors"),
             "The first of the tensors on each device.");
  module.def("are_exactly", &are_exactly, py::arg("objects"), py::arg("type"),
             "Whether all are of this class, and not of one derived from it.");
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
             "or unfrozen. False: something stands in for parameters, so it "
             "will change again.");
}

}  // namespace brigade
