// The named tensors of a module: listed, compared across ranks, broadcast.
//
// Thread safety: reads the module; nothing may change it meanwhile.

#ifndef BRIGADE_DDP_MODULE_TENSORS_H_
#define BRIGADE_DDP_MODULE_TENSORS_H_

#include <torch/nn/module.h>
#include <torch/script.h>

#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace brigade {

// A module of either kind. An nn::Module changes its buffers in place and may
// be given parameters; a script module may replace its buffers.
using AnyModule =
    std::variant<std::shared_ptr<const torch::nn::Module>, torch::jit::Module>;

struct NamedTensor {
  std::string name;  // "features.0.weight"
  at::Tensor tensor;
};

// In registration order. A tensor that is registered under several names is
// listed once, under the first.
struct ModuleTensors {
  std::string module_name;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
};

ModuleTensors tensors_of_module(const AnyModule& module);

// Collective: compares all parameters, frozen ones too, which the reducer does
// not see. `local_status`: an earlier error of this rank.
//
// Errors: ValueError on every rank alike, if there is no group, a rank's status
// is not OK, nothing is to be trained, or ranks differ.
void verify_module(const ModuleTensors& module,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   absl::Status local_status);

// Collective: afterwards every rank has the values of rank `source`. `what`
// names the tensors in errors. A world of 1 communicates nothing.
//
// Errors: PeerError if the network fails.
void broadcast_from(int source, std::span<const NamedTensor> tensors,
                    const char* what,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

}  // namespace brigade

#endif  // BRIGADE_DDP_MODULE_TENSORS_H_
