#include "brigade/hooks/output_tie.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "brigade/hooks/autograd_node.h"

namespace brigade {
namespace {

using torch::autograd::variable_list;

class OutputTie final : public torch::autograd::Node {
 public:
  std::string name() const override { return "brigade::OutputTie"; }

 private:
  variable_list apply(variable_list&& gradients) override {
    return std::move(gradients);
  }
};

bool has_history(const at::Tensor& tensor) {
  return tensor.defined() && tensor.grad_fn();
}

at::Tensor without_history(const at::Tensor& tensor, bool copies) {
  const at::NoGradGuard no_grad;
  return copies ? tensor.clone() : tensor.detach();
}

}  // namespace

std::vector<at::Tensor> tie_outputs(std::span<const at::Tensor> outputs,
                                    bool copies) {
  std::vector<at::Tensor> tied(outputs.begin(), outputs.end());
  if (!at::GradMode::is_enabled()) return tied;
  if (std::count_if(tied.begin(), tied.end(), has_history) < 2) return tied;
  const auto node = make_node<OutputTie>();
  for (at::Tensor& tensor : tied) {
    if (!has_history(tensor)) continue;
    node->add_next_edge(torch::autograd::impl::gradient_edge(tensor));
    tensor = without_history(tensor, copies);
    torch::autograd::set_history(tensor, node);
  }
  return tied;
}

}  // namespace brigade
