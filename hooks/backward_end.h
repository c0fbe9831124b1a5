// Tells how the running backward ends.
//
// Autograd runs its end-of-backward callbacks only if backward succeeds. When
// it throws, they are destroyed without having been run, and that is how
// failure is noticed here.
//
// Whoever watches is told last: callbacks that others have queued during
// backward, comm hooks that finish their work there for instance, have run.
//
// Thread safety: call from inside a backward (a hook or a node).

#ifndef BRIGADE_HOOKS_BACKWARD_END_H_
#define BRIGADE_HOOKS_BACKWARD_END_H_

#include <functional>
#include <memory>

namespace brigade {

// One of the two runs, unless `owner` has expired by then, and holds `owner`
// meanwhile: `on_end` after all nodes of the running graph task, all callbacks
// queued by them and all queued by these have been executed, on the thread that
// executed the last one (what it throws comes out of backward()); or
// `on_abandoned` when the task is dropped because of an exception. With several
// devices that may be a little later than backward() throws.
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
