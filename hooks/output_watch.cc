#include "brigade/hooks/output_watch.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "brigade/hooks/compiled_autograd.h"

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

template <typename Visit>
void for_each_watched(std::span<const at::Tensor> outputs,
                      std::optional<uint64_t> made_from, const Visit& visit) {
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    visit(output);
    if (!made_from || !output.is_view()) continue;
    const at::TensorBase& viewed = output._base();
    if (viewed.grad_fn() && viewed.grad_fn()->sequence_nr() >= *made_from) {
      visit(viewed);
    }
  }
}

}  // namespace

bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner, std::function<void()> on_reached,
                   std::optional<uint64_t> made_from) {
  bool watches_any = false;
  for_each_watched(outputs, made_from, [&](const at::TensorBase& tensor) {
    tensor.grad_fn()->add_tensor_pre_hook(
        std::make_unique<ReachedHook>(tensor.output_nr(), owner, on_reached));
    watches_any = true;
  });
  return watches_any;
}

std::vector<WeakNodePtr> watched_nodes(std::span<const at::Tensor> outputs,
                                       std::optional<uint64_t> made_from) {
  std::vector<WeakNodePtr> nodes;
  for_each_watched(outputs, made_from, [&](const at::TensorBase& tensor) {
    nodes.emplace_back(tensor.grad_fn());
  });
  return nodes;
}

}  // namespace brigade
