#include "brigade/ddp/module_check.h"

#include <c10/util/Exception.h>

#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

std::vector<std::string> describe(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> lines;
  lines.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    lines.push_back(describe_tensor(name, tensor) +
                    (tensor.requires_grad() ? ", requires_grad" : ""));
  }
  return lines;
}

absl::Status check_something_to_train(const ModuleTensors& module) {
  for (const NamedTensor& parameter : module.parameters) {
    if (parameter.tensor.requires_grad()) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "module ", module.module_name,
      " has no parameter that requires a gradient, so there is nothing to "
      "reduce; use it without DistributedDataParallel"));
}

absl::Status check_alike(const std::vector<NamedTensor>& first,
                         const std::vector<NamedTensor>& other,
                         const char* what, size_t replica) {
  if (first.size() != other.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("local replica ", replica, " must have the ", first.size(),
                     " ", what, "s of replica 0, it has ", other.size()));
  }
  for (size_t i = 0; i < first.size(); ++i) {
    const at::Tensor& expected = first[i].tensor;
    const at::Tensor& found = other[i].tensor;
    if (first[i].name == other[i].name && !expected.is_same(found) &&
        expected.sizes() == found.sizes() &&
        expected.scalar_type() == found.scalar_type() &&
        expected.requires_grad() == found.requires_grad()) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(what, " ", i, " of local replica ", replica,
                     " must be another tensor like that of replica 0, ",
                     describe_tensor(first[i].name, expected),
                     expected.requires_grad() ? ", requires_grad" : "",
                     "; it is ", describe_tensor(other[i].name, found),
                     found.requires_grad() ? ", requires_grad" : "",
                     expected.is_same(found) ? ", the same tensor" : ""));
  }
  return absl::OkStatus();
}

}  // namespace

void verify_modules(std::span<const ModuleTensors> replicas,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    absl::Status local_status) {
  TORCH_CHECK_VALUE(group,
                    "DistributedDataParallel needs a process group, got null.\n"
                    "Make one with init_process_group(), or with "
                    "single_process_group() for a world of 1.");
  const ModuleTensors& module = replicas.front();
  if (local_status.ok()) local_status = check_something_to_train(module);
  for (size_t r = 1; r < replicas.size() && local_status.ok(); ++r) {
    local_status =
        check_alike(module.parameters, replicas[r].parameters, "parameter", r);
    if (!local_status.ok()) break;
    local_status =
        check_alike(module.buffers, replicas[r].buffers, "buffer", r);
  }
  if (!module.parameters.empty()) {
    suggest_control_device(group, module.parameters.front().tensor.device());
  }
  require_agreement(group, "parameter", describe(module.parameters),
                    local_status);
  require_agreement(group, "buffer", describe(module.buffers),
                    absl::OkStatus());
}

}  // namespace brigade
