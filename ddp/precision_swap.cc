#include "brigade/ddp/precision_swap.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/output_watch.h"

namespace brigade {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

class TellReducer final : public torch::autograd::FunctionPostHook {
 public:
  TellReducer(std::weak_ptr<PrecisionSwap> owner, Reducer& reducer,
              VariableIndex variable)
      : owner_(std::move(owner)), reducer_(reducer), variable_(variable) {}

  variable_list operator()(const variable_list& outputs,
                           const variable_list& /*inputs*/) override {
    // A graph may outlive the reducer.
    if (const auto owner = owner_.lock()) {
      reducer_.gradient_ready(variable_.parameter, variable_.replica);
    }
    return outputs;
  }

 private:
  const std::weak_ptr<PrecisionSwap> owner_;
  Reducer& reducer_;
  const VariableIndex variable_;
};

}  // namespace

PrecisionSwap::PrecisionSwap(std::vector<std::vector<at::Tensor>> parameters,
                             at::ScalarType dtype, Reducer& reducer)
    : parameters_(std::move(parameters)), dtype_(dtype), reducer_(reducer) {
  reducer_.stop_watching_gradients();
}

PrecisionSwap::~PrecisionSwap() { swap_out(); }

void PrecisionSwap::swap_in() {
  swap_out();
  for (size_t r = 0; r < parameters_.size(); ++r) {
    for (size_t i = 0; i < parameters_[r].size(); ++i) {
      const at::Tensor& parameter = parameters_[r][i];
      at::Tensor full = parameter.variable_data();
      parameter.set_data(cast(full));
      std::shared_ptr<Node> accumulator =
          torch::autograd::impl::grad_accumulator(parameter);
      const uintptr_t key =
          accumulator->add_post_hook(std::make_unique<TellReducer>(
              weak_from_this(), reducer_,
              VariableIndex{.replica = r, .parameter = i}));
      swapped_.push_back({.parameter = parameter,
                          .full = std::move(full),
                          .accumulator = std::move(accumulator),
                          .hook_key = key});
    }
  }
}

void PrecisionSwap::swap_out() {
  for (const Swapped& swapped : std::exchange(swapped_, {})) {
    const at::Tensor& parameter = swapped.parameter;
    swapped.accumulator->del_post_hook(swapped.hook_key);
    parameter.set_data(swapped.full);
    at::Tensor& gradient = parameter.mutable_grad();
    if (gradient.defined() &&
        gradient.scalar_type() != parameter.scalar_type()) {
      gradient = gradient.to(parameter.scalar_type());
    }
  }
}

void PrecisionSwap::swap_out_after_backward(
    std::span<const at::Tensor> outputs) {
  watch_outputs(outputs, weak_from_this(), [this] {
    watch_backward_end(
        weak_from_this(),
        [this] {
          if (reducer_.missing_gradients().empty()) swap_out();
        },
        [this] { swap_out(); });
  });
}

at::Tensor PrecisionSwap::cast(const at::Tensor& input) const {
  return input.is_floating_point() ? input.to(dtype_) : input;
}

}  // namespace brigade
