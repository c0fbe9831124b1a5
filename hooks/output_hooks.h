// Hooks on the outputs of a forward: when a backward goes through them, and a
// tie that makes it go through all of them.

#ifndef BRIGADE_HOOKS_OUTPUT_HOOKS_H_
#define BRIGADE_HOOKS_OUTPUT_HOOKS_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace brigade {

// Calls `on_reached` when the gradient of one of `outputs` has been computed,
// unless `owner` has expired by then: once per output and backward, on
// whichever thread computes it. Outputs without a history are skipped: a leaf
// would keep the hook beyond the graph. Returns whether any has one.
bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner, std::function<void()> on_reached);

// Ties the outputs of a forward together: a backward from some of them goes
// through all. Parameters of an output that the loss leaves out get undefined
// gradients then, so that a reducer that finds unused parameters waits for none
// in vain.
//
//   auto [logits, features] = net->forward(input);
//   std::vector<at::Tensor> outputs =
//       tie_outputs(std::array{logits, features});
//   reducer.prepare_for_backward(outputs);
//   loss(outputs[0]).backward();
//
// Returns stand-ins for `outputs`, in their order, with the same values.
// Tensors without a history are returned as they are; so are all if fewer than
// two have one. A reducer takes one backward through tied outputs: add up two
// losses on two of them first.
//
// `copies`: each has memory of its own. If false, it shares the output's: a
// write in place goes unnoticed by other tensors that share it.
std::vector<at::Tensor> tie_outputs(std::span<const at::Tensor> outputs,
                                    bool copies = true);

}  // namespace brigade

#endif  // BRIGADE_HOOKS_OUTPUT_HOOKS_H_
