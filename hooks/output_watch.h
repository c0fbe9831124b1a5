// Tells when a backward pass goes through the outputs of a forward pass.
//
// Thread safety: the callback is called on whichever thread computes the
// gradient of an output, once per output and backward.

#ifndef BRIGADE_HOOKS_OUTPUT_WATCH_H_
#define BRIGADE_HOOKS_OUTPUT_WATCH_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <span>

namespace brigade {

// Calls `on_reached` when the gradient of one of `outputs` has been computed,
// unless `owner` has expired by then. Outputs without a history are skipped: a
// leaf would keep the hook beyond the graph. Returns whether any has one.
bool watch_outputs(std::span<const at::Tensor> outputs,
                   std::weak_ptr<void> owner, std::function<void()> on_reached);

}  // namespace brigade

#endif  // BRIGADE_HOOKS_OUTPUT_WATCH_H_
