// The pointers that autograd holds its nodes by, whose type depends on the
// version of torch: std::shared_ptr up to 2.12, c10::intrusive_ptr later.
// Decides nothing else; no other file names either.

#ifndef BRIGADE_HOOKS_AUTOGRAD_NODE_H_
#define BRIGADE_HOOKS_AUTOGRAD_NODE_H_

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace brigade {

using NodePtr = decltype(torch::autograd::Edge::function);
using WeakNodePtr = decltype(torch::autograd::AutogradMeta::grad_accumulator_);

// Whether `weak` points to what `node` holds, without touching its memory.
template <typename Weak, typename Strong>
bool points_to(const Weak& weak, const Strong& node) {
  if constexpr (requires { weak.owner_before(node); }) {
    return !weak.owner_before(node) && !node.owner_before(weak);
  } else {
    return weak._unsafe_get_target() == node.get();
  }
}

}  // namespace brigade

#endif  // BRIGADE_HOOKS_AUTOGRAD_NODE_H_
