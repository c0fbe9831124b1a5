#include "brigade/hooks/input_gate.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <utility>

#include "brigade/hooks/autograd_node.h"

namespace brigade {
namespace {

using torch::autograd::variable_list;

class InputGate final : public torch::autograd::Node {
 public:
  InputGate(std::weak_ptr<void> owner, std::function<void()> on_left)
      : owner_(std::move(owner)), on_left_(std::move(on_left)) {}

  std::string name() const override { return "brigade::InputGate"; }

 private:
  variable_list apply(variable_list&& gradients) override {
    if (const std::shared_ptr<void> alive = owner_.lock()) on_left_();
    return std::move(gradients);
  }

  const std::weak_ptr<void> owner_;
  const std::function<void()> on_left_;
};

bool requires_grad(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

}  // namespace

bool gate_inputs(std::span<at::Tensor> inputs, std::weak_ptr<void> owner,
                 std::function<void()> on_left) {
  if (!at::GradMode::is_enabled()) return false;
  if (std::ranges::none_of(inputs, requires_grad)) return false;
  const auto node = make_node<InputGate>(std::move(owner), std::move(on_left));
  for (at::Tensor& tensor : inputs) {
    if (!requires_grad(tensor)) continue;
    node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    at::Tensor stand_in = tensor.detach();
    torch::autograd::set_history(stand_in, node);
    tensor = std::move(stand_in);
  }
  return true;
}

}  // namespace brigade
