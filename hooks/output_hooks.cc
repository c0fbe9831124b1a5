#include "brigade/hooks/output_hooks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

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

}  // namespace

bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner,
                   std::function<void()> on_reached) {
  bool watches_any = false;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    output.grad_fn()->add_tensor_pre_hook(
        std::make_unique<ReachedHook>(output.output_nr(), owner, on_reached));
    watches_any = true;
  }
  return watches_any;
}

}  // namespace brigade
