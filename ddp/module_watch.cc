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

void append(const torch::nn::Module& module,
            std::vector<const c10::TensorImpl*>& found) {
  for (const auto& entry : OwnParameters::of(module)) {
    found.push_back(entry.value().unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) append(*child, found);
}

}  // namespace

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
  remembered_ = present_;
}

}  // namespace brigade
