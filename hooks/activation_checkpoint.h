// Activation checkpointing: runs a part of a forward without keeping its
// activations, and runs it again in backward to get them back.
//
// Example:
//
//   at::Tensor hidden = checkpoint(
//       [block](const at::Tensor& x) mutable { return block->forward(x); }, x);
//
// The first saved tensor that backward asks for runs the function again, which
// yields all of them. autograd::grad, create_graph and retain_graph work.
//
// - The function must save the same tensors in the same order in both runs.
//   Autocast, random numbers and the precision of parameters are as in the
//   first run. The function lives until backward is over. Side effects happen
//   twice.
// - Changing an input or a captured tensor in place before backward is an
//   error. Activations of an enclosing checkpoint should be inputs: captured,
//   they stay in memory.
// - Checkpoints nest; each level costs another run of the inner function.
// - Without grad mode the function is just called.
//
// Source: torch.utils.checkpoint with use_reentrant=False. Differs: takes
// tensors only, and the second run always goes to its end.
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

// While it lives, tensors that this thread's autograd saves are recomputed by
// running `function` again.
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

// What `function(inputs...)` returns. `inputs` are tensors, defined or not.
//
// Errors, out of backward: RuntimeError if an input or a captured tensor was
// changed in place, or if the second run saves other tensors. Out of
// checkpoint(): RuntimeError in mixed precision, if parameters may be in use on
// other threads during backward.
// What `function` throws comes out of checkpoint() or of backward().
template <typename Function, typename... Inputs>
auto checkpoint(Function&& function, const Inputs&... inputs) {
  static_assert(
      (std::is_convertible_v<const Inputs&, at::Tensor> && ...),
      "checkpoint() takes tensors: let the function capture the rest");
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
