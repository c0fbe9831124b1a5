// Ties the outputs of a forward together: a backward that starts from some of
// them goes through all.
//
// The parameters behind an output that the loss leaves out are reached then,
// with undefined gradients, instead of not at all: whoever waits for all
// gradients that the graph promises gets his answer.
//
// Example: a reducer that finds unused parameters, and a loss that may use one
// output or both.
//
//   auto [logits, features] = net->forward(input);
//   std::vector<at::Tensor> outputs =
//       tie_outputs(std::array{logits, features});
//   reducer.prepare_for_backward(outputs);
//   loss(outputs[0]).backward();
//
// To know: one backward through tied outputs is all that a reducer takes; two
// losses on two of them are added up first.
//
// Thread safety: pure; backwards as through any node.

#ifndef BRIGADE_HOOKS_OUTPUT_TIE_H_
#define BRIGADE_HOOKS_OUTPUT_TIE_H_

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace brigade {

// Stand-ins for `outputs`, in their order, with the same values. Tensors
// without a history, undefined ones among them, are returned as they are; so
// are all if fewer than two have one.
//
// `copies`: each has memory of its own. If false, it shares the output's, and
// must not be changed in place where another tensor shares that too: autograd
// would take the other one for unchanged.
std::vector<at::Tensor> tie_outputs(std::span<const at::Tensor> outputs,
                                    bool copies = true);

}  // namespace brigade

#endif  // BRIGADE_HOOKS_OUTPUT_TIE_H_
