// Trades time for memory: runs a part of a forward without keeping its
// activations, and runs it again in backward to get them back.
//
// Example:
//
//   at::Tensor hidden = checkpoint(
//       [block](const at::Tensor& x) mutable { return block->forward(x); }, x);
//
// Two kinds:
// - By default, autograd records the function as always, but what it would save
//   is only counted. The first saved tensor that backward asks for runs the
//   function again, which yields all of them. Everything that works without a
//   checkpoint works with it: autograd::grad, create_graph, retain_graph.
// - `reentrant`: the first run is not recorded at all. One node stands for the
//   function; in backward it records the second run, and runs a backward inside
//   of the outer one. Refuses autograd::grad and create_graph. Its outputs of
//   floating or complex type always require a gradient.
//
// To know:
// - The function must do the same in both runs: save the same tensors in the
//   same order. Autocast, random numbers and the precision of parameters
//   (hooks/parameter_casts.h) are as in the first run.
//   It is copied (or moved), and what it holds lives until backward is over.
//   Side effects happen twice.
// - Inputs are kept. Changing one in place before backward is an error. Tensors
//   that the function captured get gradients like inputs; that they were
//   changed is noticed by the default kind only. Activations of an enclosing
//   checkpoint should be inputs: captured, they stay in memory.
// - Checkpoints nest. A level of nesting costs another run of what is inside.
// - Without grad mode the function is just called.
//
// Source: torch.utils.checkpoint. Differs: takes tensors only, and the second
// run always goes to its end.
//
// Thread safety: any thread. The second run is on the thread that backward
// uses.

#ifndef BRIGADE_HOOKS_CHECKPOINT_H_
#define BRIGADE_HOOKS_CHECKPOINT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "brigade/hooks/recomputation.h"
#include "brigade/hooks/reentrant_checkpoint.h"
#include "brigade/hooks/tensor_nest.h"

namespace brigade {

struct CheckpointOptions {
  bool reentrant = false;

  // Gives the second run the random numbers of the first: those of the CPU and
  // of the devices of the inputs. Costs a copy of the generators' states.
  bool preserve_rng_state = true;
};

// What `function(inputs...)` returns. `inputs` are tensors, defined or not. A
// reentrant checkpoint must return a tensor or a nest of vectors, arrays, maps,
// pairs, tuples and optionals of them (tensor_nest.h); the other kind may
// return anything.
//
// Errors, out of backward: RuntimeError if an input was changed in place, the
// second run saves or returns other tensors, or a reentrant checkpoint is met
// by autograd::grad, by create_graph, or a second time without retain_graph.
// Out of checkpoint(): ValueError if a reentrant one returns anything else;
// RuntimeError in mixed precision, if parameters may be in use on other threads
// during backward.
// What `function` throws comes out of checkpoint() or of backward().
template <typename Function, typename... Inputs>
auto checkpoint(const CheckpointOptions& options, Function&& function,
                const Inputs&... inputs) {
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
  using Result =
      std::invoke_result_t<decltype(call)&, std::span<const at::Tensor>>;

  if (!at::GradMode::is_enabled()) return call(tensors);
  if (!options.reentrant) {
    const auto recomputation = std::make_shared<Recomputation>(
        tensors, options.preserve_rng_state,
        [call](std::span<const at::Tensor> again) { call(again); });
    const Recomputation::FirstRun first_run(recomputation);
    return call(tensors);
  }
  if constexpr (IsTensorNest<Result>) {
    ReentrantCheckpoint node(tensors, options.preserve_rng_state,
                             [call](std::span<const at::Tensor> again) {
                               Result outputs = call(again);
                               std::vector<at::Tensor> found;
                               for_each_tensor(outputs,
                                               [&found](at::Tensor& output) {
                                                 found.push_back(output);
                                               });
                               return found;
                             });
    Result outputs = [&] {
      const ReentrantCheckpoint::FirstRun first_run;
      return call(tensors);
    }();
    for_each_tensor(outputs,
                    [&node](at::Tensor& output) { node.adopt(output); });
    return outputs;
  } else {
    refuse_outputs_of_reentrant_checkpoint();
    return call(tensors);
  }
}

template <typename Function, typename... Inputs>
requires(!std::is_same_v<
         std::decay_t<Function>,
         CheckpointOptions>) auto checkpoint(Function&& function,
                                             const Inputs&... inputs) {
  return checkpoint(CheckpointOptions(), std::forward<Function>(function),
                    inputs...);
}

}  // namespace brigade

#endif  // BRIGADE_HOOKS_CHECKPOINT_H_
