// Notices that a module no longer has the parameters that are reduced.
//
// Shapes, dtypes and devices are the reducer's business; this looks at which
// tensors are registered in the module, and whether they are frozen.
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
  // `parameters`: those of the module as it was wrapped, without ignored ones.
  ModuleWatch(ModuleView view, std::vector<NamedTensor> parameters,
              std::vector<std::string> ignored);

  // Costs some nanoseconds per parameter.
  //
  // Errors: RuntimeError naming parameters that require gradients and were
  // added, removed or unfrozen since: nobody would average them.
  void check();

 private:
  void look_closely();

  const ModuleView view_;
  const std::vector<NamedTensor> parameters_;
  const std::vector<std::string> ignored_;
  std::vector<NamedTensor> frozen_;
  Registrations remembered_;
  Registrations present_;  // kept for its memory
};

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_WATCH_H_
