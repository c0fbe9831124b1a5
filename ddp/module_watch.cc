#include "brigade/ddp/module_watch.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <variant>

namespace brigade {
namespace {

// torch::nn::Module hands out copies of its dictionary, names and all; a class
// derived from it may read the dictionary itself.
class OwnParameters : public torch::nn::Module {
 public:
  static const auto& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

bool is_thawed(const RegisteredParameter& parameter) {
  return parameter.tensor.requires_grad();
}

}  // namespace

void ModuleWatch::append(const torch::nn::Module& module,
                         Registrations& found) {
  for (const auto& entry : OwnParameters::of(module)) {
    found.push_back(entry.value().unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) append(*child, found);
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
  remembered_ = present_;
}

void ModuleWatch::list_registrations() {
  present_.clear();
  if (const auto* nn =
          std::get_if<std::shared_ptr<const torch::nn::Module>>(&module_)) {
    append(**nn, present_);
  }
}

void ModuleWatch::check() {
  list_registrations();
  if (present_ == remembered_ &&
      std::ranges::none_of(wrapped_.frozen, is_thawed)) {
    return;
  }
  check_parameters(module_name_, wrapped_, present_parameters());
  remembered_ = present_;
}

std::vector<RegisteredParameter> ModuleWatch::present_parameters() const {
  if (std::holds_alternative<torch::jit::Module>(module_)) {
    return wrapped_.reduced;  // they can't change
  }
  std::vector<RegisteredParameter> present;
  for (const auto& [name, tensor] : tensors_of_module(module_).parameters) {
    present.push_back({name, tensor});
  }
  return present;
}

}  // namespace brigade
