#include "brigade/hooks/gradient_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace brigade {
namespace {

using torch::autograd::variable_list;

class ReadyHook final : public torch::autograd::FunctionPostHook {
 public:
  ReadyHook(GradientListener& listener, size_t parameter)
      : listener_(listener), parameter_(parameter) {}

  variable_list operator()(const variable_list& outputs,
                           const variable_list& /*inputs*/) override {
    listener_.on_gradient_ready(parameter_);
    return outputs;  // empty: an accumulator has no successors
  }

 private:
  GradientListener& listener_;
  const size_t parameter_;
};

}  // namespace

GradientHooks::GradientHooks(std::span<const at::Tensor> parameters,
                             GradientListener& listener) {
  registrations_.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::shared_ptr<torch::autograd::Node> accumulator =
        torch::autograd::impl::grad_accumulator(parameters[i]);
    const uintptr_t key =
        accumulator->add_post_hook(std::make_unique<ReadyHook>(listener, i));
    registrations_.push_back({std::move(accumulator), key});
  }
}

GradientHooks::~GradientHooks() {
  for (Registration& registration : registrations_) {
    registration.accumulator->del_post_hook(registration.key);
  }
}

std::optional<size_t> GradientHooks::first_detached(
    std::span<const at::Tensor> parameters) const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (torch::autograd::impl::try_get_grad_accumulator(parameters[i]) !=
        registrations_[i].accumulator) {
      return i;
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
