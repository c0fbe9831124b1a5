// Makes a comm hook of any callable from bucket to future.
//
// Example:
//
//   // Sums without averaging.
//   auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
//     std::vector<at::Tensor> tensors = {bucket.getBuffer()};
//     return group->allreduce(tensors)->getFuture();
//   });
//   Reducer reducer(parameters, group, {.comm_hook = hook});

#ifndef BRIGADE_COMM_HOOKS_FUNCTION_HOOK_H_
#define BRIGADE_COMM_HOOKS_FUNCTION_HOOK_H_

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {

// The contract of a hook, ours or c10d's:
//
// - The bucket's buffer is 1D, [numel], in the parameters' dtype, and holds
//   this rank's gradients undivided. Averaging is the hook's business.
// - The future holds the reduced buffer: a tensor of as many elements on the
//   same device, or a list of one. It may be the bucket's own buffer, changed
//   in place, or another tensor, of another dtype too. None says that the hook
//   has dealt with the gradients itself (an optimizer that steps in backward):
//   nothing is delivered.
// - Hooks run in plan order, on every rank alike, while the reducer's lock is
//   held: a hook must not call the reducer. It runs under the thread-local
//   state (grad mode, autocast, profiler) of the thread that prepared the
//   backward.
// - What a hook throws comes out of backward().
using CommHookFunction =
    std::function<c10::intrusive_ptr<c10::ivalue::Future>(c10d::GradBucket&)>;

// Errors: ValueError if `function` is empty.
std::shared_ptr<c10d::CommHookInterface> make_comm_hook(
    CommHookFunction function);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_FUNCTION_HOOK_H_
