#include "brigade/ddp/module_watch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/shortened_list.h"

namespace brigade {
namespace {

using Names = std::vector<std::string>;

// torch::nn::Module hands out copies of its dictionary, names and all; a class
// derived from it may read the dictionary itself.
class OwnParameters : public torch::nn::Module {
 public:
  static const auto& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

bool contains(const std::vector<NamedTensor>& list, const at::Tensor& tensor) {
  return std::ranges::any_of(list, [&](const NamedTensor& entry) {
    return entry.tensor.is_same(tensor);
  });
}

std::string told(const char* change, const Names& names) {
  if (names.empty()) return "";
  return absl::StrCat(
      change, ": ",
      shortened_list(names.size(), [&](size_t i) { return names[i]; }), ". ");
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

ModuleWatch::ModuleWatch(ModuleView view, std::vector<NamedTensor> parameters,
                         std::vector<std::string> ignored)
    : view_(std::move(view)),
      parameters_(std::move(parameters)),
      ignored_(std::move(ignored)) {
  std::ranges::copy_if(parameters_, std::back_inserter(frozen_),
                       [](const NamedTensor& parameter) {
                         return !parameter.tensor.requires_grad();
                       });
  if (view_.registrations) view_.registrations(remembered_);
}

void ModuleWatch::check() {
  if (view_.registrations) {
    present_.clear();
    view_.registrations(present_);
  }
  const bool unfrozen =
      std::ranges::any_of(frozen_, [](const NamedTensor& parameter) {
        return parameter.tensor.requires_grad();
      });
  if (unfrozen || (view_.registrations && present_ != remembered_)) {
    look_closely();
  }
}

void ModuleWatch::look_closely() {
  Names added;
  Names removed;
  Names unfrozen;
  if (view_.parameters) {
    const std::vector<NamedTensor> found = view_.parameters();
    for (const auto& [name, tensor] : found) {
      if (tensor.requires_grad() && !contains(parameters_, tensor) &&
          std::ranges::find(ignored_, name) == ignored_.end()) {
        added.push_back(name);
      }
    }
    for (const auto& [name, tensor] : parameters_) {
      if (tensor.requires_grad() && !contains(found, tensor)) {
        removed.push_back(name);
      }
    }
  }
  for (const auto& [name, tensor] : frozen_) {
    if (tensor.requires_grad()) unfrozen.push_back(name);
  }
  TORCH_CHECK(added.empty() && removed.empty() && unfrozen.empty(),
              "DistributedDataParallel: expected the parameters that the "
              "module had when it was wrapped. ",
              told("Added", added), told("Removed", removed),
              told("Unfrozen", unfrozen),
              "Nobody would average their gradients.\nChange the module first, "
              "then wrap it.");
  remembered_ = present_;
}

}  // namespace brigade
