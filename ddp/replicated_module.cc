#include "brigade/ddp/replicated_module.h"

#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/control_device.h"
#include "brigade/comm/peer_error.h"

namespace brigade {
namespace {

// Tensors are broadcast in pieces of this size, so that peak memory stays low.
constexpr size_t kBroadcastBytes = size_t{250} << 20;

std::vector<std::string> describe(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> lines;
  for (const auto& [name, tensor] : tensors) {
    lines.push_back(
        absl::StrCat("'", name, "' ", c10::toString(tensor.scalar_type()), " [",
                     absl::StrJoin(tensor.sizes(), ", "), "] strides [",
                     absl::StrJoin(tensor.strides(), ", "), "]",
                     tensor.requires_grad() ? " requires_grad" : ""));
  }
  return lines;
}

bool trainable(const NamedTensor& parameter) {
  return parameter.tensor.requires_grad();
}

// Checked before the reducer is made, so that a frozen or missing parameter is
// told apart from one that merely has another place among the trainable ones.
ModuleTensors verified(ModuleTensors tensors,
                       const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  TORCH_CHECK_VALUE(group,
                    "DistributedDataParallel needs a process group, got null.\n"
                    "Make one with init_process_group(), or with "
                    "single_process_group() for a world of 1.");
  absl::Status status = absl::OkStatus();
  if (std::none_of(tensors.parameters.begin(), tensors.parameters.end(),
                   trainable)) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "module ", tensors.module_name,
        " has no parameter that requires a gradient, so there is nothing to "
        "reduce; use it without DistributedDataParallel"));
  }
  const at::Device device = control_device(*group);
  require_agreement(group, device, "parameter", describe(tensors.parameters),
                    status);
  require_agreement(group, device, "buffer", describe(tensors.buffers),
                    absl::OkStatus());
  return tensors;
}

Reducer make_reducer(const ModuleTensors& module,
                     c10::intrusive_ptr<c10d::ProcessGroup> group,
                     ReducerOptions options) {
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  for (const NamedTensor& parameter : module.parameters) {
    if (!trainable(parameter)) continue;
    parameters.push_back(parameter.tensor);
    names.push_back(parameter.name);
  }
  if (options.parameter_names.empty()) {
    options.parameter_names = std::move(names);
  }
  return Reducer(std::move(parameters), std::move(group), std::move(options));
}

}  // namespace

ReplicatedModule::ReplicatedModule(LookUpTensors look_up_tensors,
                                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   DistributedDataParallelOptions options)
    : look_up_tensors_(std::move(look_up_tensors)),
      group_(std::move(group)),
      broadcast_buffers_(options.broadcast_buffers),
      reducer_(make_reducer(verified(look_up_tensors_(), group_), group_,
                            std::move(options.reducer))) {
  const ModuleTensors tensors = look_up_tensors_();
  broadcast_from_rank_0(tensors.parameters);
  broadcast_from_rank_0(tensors.buffers);
}

void ReplicatedModule::before_forward() {
  if (!broadcast_buffers_ || !will_reduce()) return;
  broadcast_from_rank_0(look_up_tensors_().buffers);
}

void ReplicatedModule::after_forward(const std::vector<at::Tensor>& outputs) {
  if (will_reduce()) reducer_.prepare_for_backward(outputs);
}

bool ReplicatedModule::will_reduce() const {
  return synchronizes_ && at::GradMode::is_enabled();
}

void ReplicatedModule::broadcast_from_rank_0(
    const std::vector<NamedTensor>& tensors) const {
  if (tensors.empty() || group_->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> to_send;
  to_send.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    to_send.push_back(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  }
  try {
    c10d::broadcast_coalesced(group_, to_send, kBroadcastBytes, /*rank=*/0);
  } catch (...) {
    throw_peer_error(
        absl::StrCat("DistributedDataParallel: broadcasting ", tensors.size(),
                     " tensors ('", tensors.front().name,
                     "', ...) from rank 0 to rank ", group_->getRank()),
        std::current_exception());
  }
}

}  // namespace brigade
