// Activation checkpointing: discards the activations of a part of a forward and
// recomputes them in backward.
//
// Example:
//
//   at::Tensor hidden = checkpoint(
//       [block](const at::Tensor& x) mutable { return block->forward(x); }, x);
//
// When backward first unpacks a saved tensor, it runs the function again and
// gets all saved tensors. autograd::grad, create_graph and retain_graph work.
//
// - The function must save the same tensors in the same order in both runs. The
//   second run restores autocast, random generators and parameter precision.
//   The function lives until backward ends. Side effects happen twice.
// - Changing an input or a captured tensor in place before backward is an
//   error. Pass activations of an enclosing checkpoint as inputs: captured
//   ones stay in memory.
// - Checkpoints nest; each level adds another run of the inner function.
// - Without grad mode, checkpoint() only calls the function.
//
// Source: torch.utils.checkpoint with use_reentrant=False. Differs: the inputs
// are tensors only, and the second run does not stop early.
//
// Thread safety: any thread. The second run is on the thread of backward.

#ifndef BRIGADE_HOOKS_ACTIVATION_CHECKPOINT_H_
#define BRIGADE_HOOKS_ACTIVATION_CHECKPOINT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

namespace brigade {

// First run of a checkpointed function. While it lives, this thread's autograd
// saves no tensors; backward recomputes them by calling `function`.
class CheckpointedRun {
 public:
  CheckpointedRun(std::span<const at::Tensor> inputs,
                  std::function<void(std::span<const at::Tensor>)> function);
  ~CheckpointedRun();
  CheckpointedRun(const CheckpointedRun&) = delete;
  CheckpointedRun& operator=(const CheckpointedRun&) = delete;

 private:
  class Scope;
  const std::unique_ptr<Scope> scope_;
};

// Returns `function(inputs...)`. `inputs` are tensors, defined or not.
//
// Errors: RuntimeError in mixed precision, if parameters may be in use on other
// threads during backward. In backward: RuntimeError if an input or a captured
// tensor was changed in place, or if the second run saves other tensors.
// Exceptions of `function` propagate out of checkpoint() or backward().
template <typename Function, typename... Inputs>
auto checkpoint(Function&& function, const Inputs&... inputs) {
  static_assert(
      (std::is_convertible_v<const Inputs&, at::Tensor> && ...),
      "checkpoint() takes tensors: let the function capture other arguments");
  const std::array<at::Tensor, sizeof...(Inputs)> tensors = {inputs...};
  const auto call = [held = std::make_shared<std::decay_t<Function>>(
                         std::forward<Function>(function))](
                        std::span<const at::Tensor> arguments) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return (*held)(arguments[I]...);
    }
    (std::index_sequence_for<Inputs...>());
  };
  if (!at::GradMode::is_enabled()) return call(tensors);
  const CheckpointedRun first_run(
      tensors, [call](std::span<const at::Tensor> again) { call(again); });
  return call(tensors);
}

}  // namespace brigade

#endif  // BRIGADE_HOOKS_ACTIVATION_CHECKPOINT_H_
