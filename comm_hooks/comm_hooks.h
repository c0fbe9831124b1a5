// Comm hooks: what carries a bucket's gradients between ranks, and averages
// them. The built-in ones, and how to make one of a function.
//
//   // Sums without averaging.
//   auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
//     std::vector<at::Tensor> tensors = {bucket.getBuffer()};
//     return group->allreduce(tensors)->getFuture();
//   });
//   Reducer reducer(parameters, group, {.comm_hook = hook});
//
// Hooks do not keep their group alive.

#ifndef BRIGADE_COMM_HOOKS_COMM_HOOKS_H_
#define BRIGADE_COMM_HOOKS_COMM_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {

using CommHookPtr = std::shared_ptr<c10d::CommHookInterface>;
using HookFuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// ---- Built-in hooks: averages over the ranks of `group`. Errors: ValueError
// if it is null.

// Gradients in their own dtype, by the group.
CommHookPtr all_reduce_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Half the bytes of float32; gradients above 65504 become infinite. Divides
// before the cast (torch's fp16_compress_hook: after it), so that a sum
// overflows only where the average does.
CommHookPtr fp16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Half the bytes of float32, with its range and 8 bits of precision.
CommHookPtr bf16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Sums in rank order, so that the bits do not depend on the buckets, as with
// ReducerOptions::reproducible. Collective. Sparse gradients are a ValueError
// in backward. Errors: as OrderedCollectives'.
CommHookPtr ordered_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// ---- A hook of a function.

// The contract of a hook, ours or c10d's (docs/hooks.md):
//
// - The bucket's buffer holds this rank's gradients undivided (of several local
//   replicas: their mean), in the parameters' dtype: 1D, [numel]; complex ones
//   as pairs of reals, [2 * numel]; a sparse one as a COO tensor of the
//   parameter's shape.
// - The future holds the reduced buffer: the same number of elements on the
//   same device (of a sparse one: its shape), in any floating-point dtype, or a
//   list of one such tensor. It may be the bucket's own buffer. None: the hook
//   has consumed the gradients, nothing is delivered.
// - A rank that has run out of data, or whose backward has failed, calls the
//   hook on zeros. State that follows the gradients must stand that
//   (comm_hooks/hook_traits.h).
// - Hooks run in plan order, identical on all ranks, with the engine's lock
//   held: a hook must not call the reducer. Thread-local state is that of the
//   thread that prepared the backward, but grad mode and autocast are off.
// - Exceptions of the hook, and of continuations of its future, come out of
//   backward(): on this rank with bucket, iteration and rank added, a
//   c10::Error with its type and anything else as RuntimeError; on the others
//   as an error that names this rank. Nobody delivers then. Training can go on
//   unless the hook had launched something: see Reducer::can_continue().
using CommHookFunction = std::function<HookFuturePtr(c10d::GradBucket&)>;

// `name`: for messages; ranks whose names differ are told so. Errors:
// ValueError if `function` is empty.
CommHookPtr make_comm_hook(CommHookFunction function, std::string name = "");

// ---- A second collective after the first one of a hook.

// Launches the second collective, given the value of the first, and returns its
// future. Its exceptions come out of backward, and end the group's use.
using NextCollective = std::function<HookFuturePtr(const c10::IValue&)>;

// Returns a future of the value of `next`'s future. `next` is called in the
// order of the buckets when backward ends: continuations of the first future
// would run in another order on each rank.
//
//   auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
//     return then_collective(group->_reduce_scatter_base(...)->getFuture(),
//                            [group](const c10::IValue& reduced) {
//       return group->_allgather_base(...)->getFuture();
//     });
//   });
//
// Called by a hook, on the thread that runs it. Outside of a reducer's comm
// hook, waits for `first` and calls `next` at once.
HookFuturePtr then_collective(HookFuturePtr first, NextCollective next);

// ---- An optimizer that steps in backward.

// Updates one parameter by its `.grad`, the reduced gradient in the parameter's
// dtype. Called without recording gradients, once per parameter and reduced
// backward, on the threads that complete buckets. With LibTorch's optimizers
// make one per parameter.
using ParameterStep = std::function<void(const at::Tensor& parameter)>;
using ParameterFilter = std::function<bool(const at::Tensor& parameter)>;

// Updates each parameter as soon as its bucket has arrived, and frees its
// gradient.
//
//   auto step = [](const at::Tensor& parameter) {
//     at::Tensor target = parameter;
//     target.sub_(parameter.grad(), 0.1);
//   };
//   ReducerOptions reducer = {
//       .comm_hook = step_in_backward(all_reduce_hook(group), step)};
//   DistributedDataParallel model(net, group, {.reducer = reducer});
//   loss(model(input), target).backward();  // and that is the whole step
//
// `hook` carries the buckets. A parameter that no rank used is stepped by a
// gradient of zeros. With several local replicas only the first is stepped. An
// exception of `step` comes out of backward() as RuntimeError with its text;
// later parameters of its bucket are not stepped. An iteration that fails
// otherwise may have stepped some parameters, the same on all ranks. A rank
// that has joined (join()) does not step; it is given the model in the end.
//
// Parameters for which `is_stepped` is false get gradients as usual. A bucket
// that holds both kinds is an error: give a bucket_plan that keeps them apart.
//
// Errors: ValueError if `hook` is null or `step` empty.
CommHookPtr step_in_backward(CommHookPtr hook, ParameterStep step,
                             ParameterFilter is_stepped = nullptr);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_COMM_HOOKS_H_
