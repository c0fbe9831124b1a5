#include "brigade/ddp/module_watch.h"

#include <algorithm>
#include <utility>

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

void append_registrations(const torch::nn::Module& module,
                          Registrations& found) {
  for (const auto& entry : OwnParameters::of(module)) {
    found.push_back(entry.value().unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) {
    append_registrations(*child, found);
  }
}

ModuleWatch::ModuleWatch(ModuleView view, const ModuleTensors& tensors,
                         std::vector<std::string> ignored)
    : view_(std::move(view)), module_name_(tensors.module_name) {
  wrapped_.ignored = std::move(ignored);
  for (const auto& [name, tensor] : tensors.parameters) {
    (tensor.requires_grad() ? wrapped_.reduced : wrapped_.frozen)
        .push_back({name, tensor});
  }
  if (view_.registrations) view_.registrations(remembered_);
}

void ModuleWatch::check() {
  if (view_.registrations) {
    present_.clear();
    view_.registrations(present_);
  }
  if (present_ == remembered_ &&
      std::ranges::none_of(wrapped_.frozen, is_thawed)) {
    return;
  }
  check_parameters(module_name_, wrapped_, present_parameters());
  remembered_ = present_;
}

std::vector<RegisteredParameter> ModuleWatch::present_parameters() const {
  if (!view_.parameters) return wrapped_.reduced;  // they can't change
  std::vector<RegisteredParameter> present;
  for (const auto& [name, tensor] : view_.parameters()) {
    present.push_back({name, tensor});
  }
  return present;
}

}  // namespace brigade
