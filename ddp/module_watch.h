// Throws if a module no longer has the parameters that are reduced: compares
// the registered tensors, and calls check_parameters() if they changed.
//
// Thread safety: one call at a time, and none while the module changes.

#ifndef BRIGADE_DDP_MODULE_WATCH_H_
#define BRIGADE_DDP_MODULE_WATCH_H_

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "brigade/ddp/module_tensors.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

class ModuleWatch {
 public:
  // `tensors`: of the module as it was wrapped, whose parameters are without
  // ignored ones.
  ModuleWatch(AnyModule module, const ModuleTensors& tensors,
              std::vector<std::string> ignored);

  // Costs some nanoseconds per parameter. Errors: check_parameters()'.
  void check();

 private:
  // One entry per registration, in an order that only registrations change.
  // None of a script module, which keeps its parameters.
  using Registrations = std::vector<const c10::TensorImpl*>;

  void list_registrations();

  const AnyModule module_;
  const std::string module_name_;
  WrappedParameters wrapped_;
  Registrations remembered_;
  Registrations present_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_WATCH_H_
