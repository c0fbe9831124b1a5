// The end of the running backward, successful or not.
//
// When backward throws, autograd destroys its end-of-backward callbacks without
// running them: that is how failure is noticed.
//
// Thread safety: call from inside a backward (a hook or a node).

#ifndef BRIGADE_HOOKS_BACKWARD_END_H_
#define BRIGADE_HOOKS_BACKWARD_END_H_

#include <functional>
#include <memory>

namespace brigade {

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

#endif  // BRIGADE_HOOKS_BACKWARD_END_H_
