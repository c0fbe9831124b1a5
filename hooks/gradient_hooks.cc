#include "brigade/hooks/gradient_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace brigade {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(GradientListener& listener, VariableIndex variable)
      : listener_(listener), variable_(variable) {}

  variable_list operator()(const variable_list& outputs,
                           const variable_list& inputs) override {
    listener_.on_gradient_ready(variable_, inputs.at(0).defined());
    return outputs;  // empty: an accumulator has no successors
  }

 private:
  GradientListener& listener_;
  const VariableIndex variable_;
};

}  // namespace

GradientHooks::GradientHooks(std::span<const std::vector<at::Tensor>> replicas,
                             GradientListener& listener) {
  for (size_t r = 0; r < replicas.size(); ++r) {
    registrations_.reserve(replicas.size() * replicas[r].size());
    for (size_t i = 0; i < replicas[r].size(); ++i) {
      std::shared_ptr<Node> accumulator =
          torch::autograd::impl::grad_accumulator(replicas[r][i]);
      const uintptr_t key =
          accumulator->add_post_hook(std::make_unique<ReadyHook>(
              listener, VariableIndex{.replica = r, .parameter = i}));
      registrations_.push_back({std::move(accumulator), key});
    }
  }
}

GradientHooks::~GradientHooks() { remove(); }

void GradientHooks::remove() {
  for (Registration& registration : registrations_) {
    registration.accumulator->del_post_hook(registration.key);
  }
  registrations_.clear();
}

std::optional<VariableIndex> GradientHooks::first_detached(
    std::span<const std::vector<at::Tensor>> replicas) const {
  if (registrations_.empty()) return std::nullopt;
  auto registration = registrations_.begin();
  for (size_t r = 0; r < replicas.size(); ++r) {
    for (size_t i = 0; i < replicas[r].size(); ++i, ++registration) {
      // Compares without looking at the accumulator, which may be cold.
      const std::weak_ptr<Node>& current =
          torch::autograd::impl::get_autograd_meta(replicas[r][i])
              ->grad_accumulator_;
      const std::shared_ptr<Node>& hooked = registration->accumulator;
      if (current.owner_before(hooked) || hooked.owner_before(current)) {
        return VariableIndex{.replica = r, .parameter = i};
      }
    }
  }
  return std::nullopt;
}

std::vector<torch::autograd::Node*> GradientHooks::accumulators() const {
  std::vector<torch::autograd::Node*> accumulators;
  accumulators.reserve(registrations_.size());
  for (const Registration& registration : registrations_) {
    accumulators.push_back(registration.accumulator.get());
  }
  return accumulators;
}

}  // namespace brigade
