#include "brigade/ddp/module_tensors.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

// Lists each tensor of an nn dictionary or a jit list of named tensors once.
template <typename Entries>
std::vector<NamedTensor> list_once(const Entries& entries) {
  std::vector<NamedTensor> tensors;
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) {
      tensors.push_back({name, tensor});
    }
  };
  for (const auto& entry : entries) {
    if constexpr (requires { entry.key(); }) {
      add(entry.key(), entry.value());
    } else {
      add(entry.name, entry.value);
    }
  }
  return tensors;
}

std::vector<std::string> describe(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> lines;
  lines.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    lines.push_back(describe_tensor(name, tensor) +
                    (tensor.requires_grad() ? ", requires_grad" : ""));
  }
  return lines;
}

absl::Status check_requires_gradient(const ModuleTensors& module) {
  if (std::ranges::any_of(module.parameters, [](const NamedTensor& parameter) {
        return parameter.tensor.requires_grad();
      })) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("module ", module.module_name,
                   " has no parameter that requires a gradient; use it without "
                   "DistributedDataParallel"));
}

// Reads the parameter dictionary of a module in place: torch::nn::Module only
// returns copies, but derived classes may access the dictionary.
class ParametersAccess : public torch::nn::Module {
 public:
  static const auto& of(const torch::nn::Module& module) {
    return module.*(&ParametersAccess::parameters_);
  }
};

void append_registrations(const torch::nn::Module& module,
                          std::vector<const c10::TensorImpl*>& registrations) {
  for (const auto& entry : ParametersAccess::of(module)) {
    registrations.push_back(entry.value().unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) {
    append_registrations(*child, registrations);
  }
}

}  // namespace

ModuleTensors tensors_of_module(const AnyModule& module) {
  if (const auto* nn =
          std::get_if<std::shared_ptr<const torch::nn::Module>>(&module)) {
    return {.module_name = (*nn)->name(),
            .parameters = list_once((*nn)->named_parameters()),
            .buffers = list_once((*nn)->named_buffers())};
  }
  const auto& script = std::get<torch::jit::Module>(module);
  return {.module_name = script.type()->repr_str(),
          .parameters = list_once(script.named_parameters()),
          .buffers = list_once(script.named_buffers())};
}

void verify_module(const ModuleTensors& module,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   absl::Status local_status) {
  TORCH_CHECK_VALUE(group,
                    "DistributedDataParallel: expected a process group, got "
                    "null.\nCreate one with init_process_group(), or with "
                    "single_process_group() for a world of 1.");
  if (local_status.ok()) local_status = check_requires_gradient(module);
  if (!module.parameters.empty()) {
    suggest_control_device(group, module.parameters.front().tensor.device());
  }
  require_agreement(group, "DistributedDataParallel: parameter",
                    describe(module.parameters), local_status);
  require_agreement(group, "DistributedDataParallel: buffer",
                    describe(module.buffers), absl::OkStatus());
}

void broadcast_from(int source, std::span<const NamedTensor> tensors,
                    const char* kind,
                    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::vector<at::Tensor> values;
  values.reserve(tensors.size());
  for (const NamedTensor& named : tensors) values.push_back(named.tensor);
  try {
    broadcast_tensors(group, values, source);
  } catch (...) {
    throw_peer_error(absl::StrCat("DistributedDataParallel: broadcasting ",
                                  tensors.size(), " ", kind, " from rank ",
                                  source, " to rank ", group->getRank()),
                     std::current_exception());
  }
}

ModuleWatch::ModuleWatch(AnyModule module, const ModuleTensors& tensors,
                         std::vector<std::string> ignored)
    : module_(std::move(module)), module_name_(tensors.module_name) {
  wrapped_.ignored = std::move(ignored);
  for (const auto& [name, tensor] : tensors.parameters) {
    (tensor.requires_grad() ? wrapped_.reduced : wrapped_.frozen)
        .push_back({name, tensor});
  }
  list_registrations();
  checked_ = current_;
}

void ModuleWatch::list_registrations() {
  current_.clear();
  if (const auto* nn =
          std::get_if<std::shared_ptr<const torch::nn::Module>>(&module_)) {
    append_registrations(**nn, current_);
  }
}

void ModuleWatch::check() {
  list_registrations();
  if (current_ == checked_ &&
      std::ranges::none_of(wrapped_.frozen, [](const auto& parameter) {
        return parameter.tensor.requires_grad();
      })) {
    return;
  }
  std::vector<RegisteredParameter> present;
  for (const auto& [name, tensor] : tensors_of_module(module_).parameters) {
    present.push_back({name, tensor});
  }
  check_parameters(module_name_, wrapped_, present);
  checked_ = current_;
}

}  // namespace brigade
