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
#include "brigade/comm/agreement.h"
#include "brigade/comm/control_device.h"
#include "brigade/comm/describe_tensor.h"
#include "brigade/comm/peer_error.h"

namespace brigade {
namespace {

// Tensors are broadcast in pieces of this size, so that peak memory stays low.
constexpr size_t kBroadcastBytes = size_t{250} << 20;

std::vector<std::string> describe(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> lines;
  lines.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    lines.push_back(describe_tensor(name, tensor) +
                    (tensor.requires_grad() ? ", requires_grad" : ""));
  }
  return lines;
}

std::vector<at::Tensor> tensors_in(const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(named.size());
  for (const NamedTensor& entry : named) tensors.push_back(entry.tensor);
  return tensors;
}

bool trainable(const NamedTensor& parameter) {
  return parameter.tensor.requires_grad();
}

// Checked before the reducer is made, so that a frozen or missing parameter is
// told apart from one that merely has another place among the trainable ones.
void verify(const ModuleTensors& module,
            const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  TORCH_CHECK_VALUE(group,
                    "DistributedDataParallel needs a process group, got null.\n"
                    "Make one with init_process_group(), or with "
                    "single_process_group() for a world of 1.");
  absl::Status status = absl::OkStatus();
  if (std::none_of(module.parameters.begin(), module.parameters.end(),
                   trainable)) {
    status = absl::InvalidArgumentError(absl::StrCat(
        "module ", module.module_name,
        " has no parameter that requires a gradient, so there is nothing to "
        "reduce; use it without DistributedDataParallel"));
  }
  const at::Device device = control_device(*group);
  require_agreement(group, device, "parameter", describe(module.parameters),
                    status);
  require_agreement(group, device, "buffer", describe(module.buffers),
                    absl::OkStatus());
}

Reducer make_reducer(const ModuleTensors& module,
                     c10::intrusive_ptr<c10d::ProcessGroup> group,
                     ReducerOptions options) {
  verify(module, group);
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

ReplicatedModule::ReplicatedModule(const ModuleTensors& module,
                                   BufferLookup buffers,
                                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   DistributedDataParallelOptions options)
    : buffers_(std::move(buffers)),
      group_(std::move(group)),
      broadcast_buffers_(options.broadcast_buffers),
      reducer_(make_reducer(module, group_, std::move(options.reducer))) {
  broadcast_from_rank_0(tensors_in(module.parameters), "parameters");
  broadcast_from_rank_0(tensors_in(module.buffers), "buffers");
}

void ReplicatedModule::before_forward() {
  if (will_reduce()) reducer_.forward_begins();
  if (!broadcast_buffers_ || !will_reduce() || group_->getSize() == 1) return;
  // Before anything that one rank may fail in alone.
  reducer_.rebuild_buckets();
  reducer_.recover();  // ranks may be out of step
  broadcast_from_rank_0(buffers_(), "buffers");
}

void ReplicatedModule::after_forward(const std::vector<at::Tensor>& outputs) {
  if (!at::GradMode::is_enabled()) return;
  if (synchronizes_) {
    reducer_.prepare_for_backward(outputs);
  } else {
    reducer_.cancel_preparation();
  }
}

bool ReplicatedModule::will_reduce() const {
  return synchronizes_ && at::GradMode::is_enabled();
}

void ReplicatedModule::broadcast_from_rank_0(
    const std::vector<at::Tensor>& tensors, const char* what) const {
  if (tensors.empty() || group_->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> to_send;
  to_send.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    to_send.push_back(tensor.is_complex() ? at::view_as_real(tensor) : tensor);
  }
  try {
    c10d::broadcast_coalesced(group_, to_send, kBroadcastBytes, /*rank=*/0);
  } catch (...) {
    throw_peer_error(
        absl::StrCat("DistributedDataParallel: broadcasting ", tensors.size(),
                     " ", what, " from rank 0 to rank ", group_->getRank()),
        std::current_exception());
  }
}

}  // namespace brigade
