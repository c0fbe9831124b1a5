// Hooks on the outputs of a forward, called when a backward goes through them.

#ifndef BRIGADE_HOOKS_OUTPUT_HOOKS_H_
#define BRIGADE_HOOKS_OUTPUT_HOOKS_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>

namespace brigade {

// Calls `on_reached` when the gradient of one of `outputs` has been computed,
// unless `owner` has expired by then: once per output and backward, on
// whichever thread computes it. Outputs without a history are skipped: a leaf
// would keep the hook beyond the graph. Returns whether any has one.
bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner, std::function<void()> on_reached);

}  // namespace brigade

#endif  // BRIGADE_HOOKS_OUTPUT_HOOKS_H_
