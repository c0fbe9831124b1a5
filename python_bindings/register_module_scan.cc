#include "brigade/python_bindings/register_module_scan.h"

#include "brigade/python_bindings/module_scan.h"

namespace brigade {

void register_module_scan(py::module_& module) {
  py::class_<ModuleScan>(
      module, "ModuleScan",
      "What a module holds, from one walk over its submodules. Keeps all that "
      "it has found alive, out of the garbage collector's sight: for a moment.")
      .def(py::init<py::object>(), py::arg("module"))
      .def("named_parameters", &ModuleScan::named_parameters,
           "What dict(module.named_parameters()) gives.")
      .def("named_buffers", &ModuleScan::named_buffers,
           "What dict(module.named_buffers()) gives.")
      .def(
          "reduced_parameters", &ModuleScan::reduced_parameters,
          py::arg("ignored"),
          "Tensors, names, and whether gradients are sparse, of the parameters "
          "that require one and whose names are not ignored. As torch's "
          "DistributedDataParallel has them: each once, in the order of "
          "registration; a dot before the names of the root's own; a shared "
          "one by its last name.")
      .def("classes", &ModuleScan::classes,
           "Those of the module and its submodules.")
      .def("frozen_parameters", &ModuleScan::frozen_parameters,
           "Those that require no gradient, each once.")
      .def("tables", &ModuleScan::tables,
           "The tables in which parameters and submodules are registered.");
  module.def("one_per_device", &one_per_device, py::arg("tensors"),
             "The first of the tensors on each device.");
  module.def("entries_of", &entries_of, py::arg("tables"),
             "What is registered in tables of a module, one list for all.");
  module.def("has_entries", &has_entries, py::arg("tables"), py::arg("entries"),
             "Whether entries_of() would give that list.");
}

}  // namespace brigade
