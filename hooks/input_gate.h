// Tells when a backward has left a part of a graph.
//
// The inputs of the part go through one node, which backward runs when it has
// come to all of them: behind all that the part computes, since what was
// recorded later runs earlier. Where no input requires a gradient there is no
// such node.
//
// Thread safety: the callback is called on whichever thread runs the node.

#ifndef BRIGADE_HOOKS_INPUT_GATE_H_
#define BRIGADE_HOOKS_INPUT_GATE_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>

namespace brigade {

// Puts stand-ins, with the same memory, in place of those inputs that require a
// gradient. `on_left` is called, unless `owner` has expired, each time that a
// backward has come to all of them. Returns whether there is any.
//
// A stand-in may be changed in place where its input might be, but for a leaf.
bool gate_inputs(std::span<at::Tensor> inputs, std::weak_ptr<void> owner,
                 std::function<void()> on_left);

}  // namespace brigade

#endif  // BRIGADE_HOOKS_INPUT_GATE_H_
