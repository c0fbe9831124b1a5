// Makes a comm hook of any callable from bucket to future.
//
// Example:
//
//   // Sums without averaging.
//   auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
//     std::vector<at::Tensor> tensors = {bucket.getBuffer()};
//     return future_of(group->allreduce(tensors), tensors[0]);
//   });
//   Reducer reducer(parameters, group, {.comm_hook = hook});

#ifndef BRIGADE_COMM_HOOKS_FUNCTION_HOOK_H_
#define BRIGADE_COMM_HOOKS_FUNCTION_HOOK_H_

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {

// The contract of a hook, ours or c10d's:
//
// - The bucket's buffer holds this rank's gradients undivided (of several local
//   replicas: their mean), in the parameters' dtype: 1D, [numel]; complex ones
//   as pairs of reals, [2 * numel]; a sparse one as a COO tensor of the
//   parameter's shape. Averaging over ranks is the hook's business.
// - The future holds the reduced buffer: a tensor of as many elements on the
//   same device (of a sparse one: of its shape), or a list of one. It may be
//   the bucket's own buffer, changed in place, or another tensor, of another
//   floating-point dtype too. None says that the hook has dealt with the
//   gradients itself (an optimizer that steps in backward): nothing is
//   delivered.
// - A rank that has run out of data, or whose backward has failed, calls the
//   hook on zeros: its peers wait for what it launches. State that follows the
//   gradients must stand that (comm_hooks/hook_traits.h).
// - Hooks run in plan order, on every rank alike, while the engine's lock is
//   held: a hook must not call the reducer. It runs under the thread-local
//   state of the thread that prepared the backward, but with grad mode and
//   autocast off.
// - A second collective behind the first goes through then_collective(): a
//   continuation of the future must not launch any, since continuations run in
//   another order on each rank.
// - What a hook throws comes out of backward(), and so does what a continuation
//   of its future throws: on this rank with bucket, iteration and rank added, a
//   c10::Error with its type and anything else as RuntimeError; on the others
//   as an error that tells of it. Nobody delivers then. Training can go on
//   unless the hook had launched something before it threw: see
//   Reducer::can_continue().
using CommHookFunction =
    std::function<c10::intrusive_ptr<c10::ivalue::Future>(c10d::GradBucket&)>;

// `name`: for messages; ranks whose names differ are told so. Errors:
// ValueError if `function` is empty.
std::shared_ptr<c10d::CommHookInterface> make_comm_hook(
    CommHookFunction function, std::string name = "");

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_FUNCTION_HOOK_H_
