// Notices that a module no longer has the parameters that are reduced.
//
// Looks at which tensors are registered in the module, and whether they are
// frozen; if that is not as it was, reducer/parameter_changes.h has a closer
// look.
//
// Thread safety: one call at a time, and none while the module changes.

#ifndef BRIGADE_DDP_MODULE_WATCH_H_
#define BRIGADE_DDP_MODULE_WATCH_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "brigade/ddp/module_tensors.h"
#include "brigade/reducer/parameter_changes.h"

namespace brigade {

// What is registered in a module now, without touching the tensors: one entry
// per registration, in an order that only registrations change.
using Registrations = std::vector<const c10::TensorImpl*>;

void append_registrations(const torch::nn::Module& module,
                          Registrations& found);

// How to look at a module again. Empty functions: it does not change.
struct ModuleView {
  std::function<void(Registrations&)> registrations;
  std::function<std::vector<NamedTensor>()> parameters;
};

class ModuleWatch {
 public:
  // `tensors`: of the module as it was wrapped, whose parameters are without
  // ignored ones.
  ModuleWatch(ModuleView view, const ModuleTensors& tensors,
              std::vector<std::string> ignored);

  // Costs some nanoseconds per parameter. Errors: check_parameters()'.
  void check();

 private:
  std::vector<RegisteredParameter> present_parameters() const;

  const ModuleView view_;
  const std::string module_name_;
  WrappedParameters wrapped_;
  Registrations remembered_;
  Registrations present_;  // kept for its memory
};

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_WATCH_H_
