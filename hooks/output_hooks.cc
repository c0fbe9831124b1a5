#include "brigade/hooks/output_hooks.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <utility>

#include "brigade/hooks/autograd_node.h"
#include "brigade/hooks/gradient_hooks.h"

namespace brigade {
namespace {

using torch::autograd::variable_list;

class ReachedHook final : public torch::autograd::FunctionPreHook {
 public:
  ReachedHook(size_t output, std::weak_ptr<void> owner,
              std::function<void()> on_reached)
      : output_(output),
        owner_(std::move(owner)),
        on_reached_(std::move(on_reached)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (!gradients.at(output_).defined()) return gradients;
    if (std::shared_ptr<void> alive = owner_.lock()) on_reached_();
    return gradients;
  }

  void compiled_args(
      torch::dynamo::autograd::CompiledNodeArgs&) const override {
    refuse_compiled_autograd();
  }

 private:
  const size_t output_;  // of the node
  const std::weak_ptr<void> owner_;
  const std::function<void()> on_reached_;
};

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

bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner,
                   std::function<void()> on_reached) {
  bool watches_any = false;
  for (const at::Tensor& output : outputs) {
    if (!has_history(output)) continue;
    output.grad_fn()->add_tensor_pre_hook(
        std::make_unique<ReachedHook>(output.output_nr(), owner, on_reached));
    watches_any = true;
  }
  return watches_any;
}

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
