// Parameters and buffers of a wrapped module: listed by name, compared across
// ranks, broadcast, and checked for later changes.
//
// Thread safety: one call at a time, and none while the module changes.

#ifndef BRIGADE_DDP_MODULE_TENSORS_H_
#define BRIGADE_DDP_MODULE_TENSORS_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/script.h>

#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

// A torch::nn::Module changes its buffers in place, and parameters may be added
// to it. A script module may replace its buffers.
using AnyModule =
    std::variant<std::shared_ptr<const torch::nn::Module>, torch::jit::Module>;

struct NamedTensor {
  std::string name;  // "features.0.weight"
  at::Tensor tensor;
};

// Tensors in registration order. A tensor with several names is listed once,
// under the first.
struct ModuleTensors {
  std::string module_name;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
};

ModuleTensors tensors_of_module(const AnyModule& module);

// Collective: compares parameters and buffers across ranks, frozen parameters
// included. `local_status`: an earlier error of this rank.
//
// Errors: ValueError on every rank if one has a status that is not OK or no
// parameter that requires a gradient, or if ranks differ. ValueError on this
// rank if `group` is null.
void verify_module(const ModuleTensors& module,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   absl::Status local_status);

// Collective: copies the values of rank `source` to all ranks. `kind` names the
// tensors in errors. A world of 1 communicates nothing.
//
// Errors: PeerError if communication fails.
void broadcast_from(int source, std::span<const NamedTensor> tensors,
                    const char* kind,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Check that a module still has the parameters that were wrapped.
class ModuleWatch {
 public:
  // `tensors`: of the module when it was wrapped, without ignored parameters.
  ModuleWatch(AnyModule module, const ModuleTensors& tensors,
              std::vector<std::string> ignored);

  // Takes a few nanoseconds per parameter if nothing has changed.
  //
  // Errors: those of check_parameters().
  void check();

 private:
  // One entry per registration. Empty for a script module, whose parameters
  // can't be replaced.
  using Registrations = std::vector<const c10::TensorImpl*>;

  void list_registrations();

  const AnyModule module_;
  const std::string module_name_;
  WrappedParameters wrapped_;
  Registrations checked_;  // at the last successful check
  Registrations current_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_TENSORS_H_
