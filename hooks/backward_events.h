// Events of a backward: it goes through a forward's outputs, and it ends,
// successful or not.

#ifndef BRIGADE_HOOKS_BACKWARD_EVENTS_H_
#define BRIGADE_HOOKS_BACKWARD_EVENTS_H_

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

// ---- Called from inside a backward, by a hook or a node.

// Runs one of the two, unless `owner` has expired by then, and holds `owner`
// meanwhile. `on_end`: after all nodes of the running graph task, the callbacks
// that they queued and those that these queued, on the thread of the last one;
// its exceptions come out of backward(). `on_abandoned`: when the task is
// dropped because of an exception; with several devices a little later than
// backward() throws.
//
// REQUIRES: `on_abandoned` does not throw.
//
// Errors: c10::Error outside of a backward.
void watch_backward_end(std::weak_ptr<void> owner, std::function<void()> on_end,
                        std::function<void()> on_abandoned);

// Identifies the backward that this thread is executing; -1 outside of one.
// Reentrant backwards have ids of their own.
int running_backward_id();

// True if the backward that this thread is executing accumulates gradients of
// all leaves that it reaches: false if it was asked for some only, or only to
// return them (torch::autograd::grad).
bool accumulates_all_gradients();

}  // namespace brigade

#endif  // BRIGADE_HOOKS_BACKWARD_EVENTS_H_
