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

// Half the bytes of float32. Divides before the cast, so that a sum overflows
// only where the average does. Range: 6e-8 to 65504; larger gradients become
// infinite.
//
// Source: torch.distributed's fp16_compress_hook. Differs: it casts first and
// divides the half-precision numbers.
CommHookPtr fp16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Half the bytes of float32, with its range and 8 bits of precision.
CommHookPtr bf16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Averages whose bits do not depend on the buckets: an element is summed in
// rank order and divided once. Collective. ReducerOptions::reproducible is the
// same without a hook. Sparse gradients are a ValueError in backward. Errors:
// as OrderedCollectives'.
CommHookPtr ordered_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Adds up over ranks and divides by nothing. Several local replicas are
// averaged before that.
CommHookPtr sum_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// ---- A hook of a function.

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
// - Hooks run in plan order, identical on all ranks, while the engine's lock is
//   held: a hook must not call the reducer. It runs under the thread-local
//   state of the thread that prepared the backward, but with grad mode and
//   autocast off.
// - A second collective after the first goes through then_collective().
// - What a hook throws comes out of backward(), and so does what a continuation
//   of its future throws: on this rank with bucket, iteration and rank added, a
//   c10::Error with its type and anything else as RuntimeError; on the others
//   as an error that names this rank. Nobody delivers then. Training can go on
//   unless the hook had launched something before it threw: see
//   Reducer::can_continue().
using CommHookFunction = std::function<HookFuturePtr(c10d::GradBucket&)>;

// `name`: for messages; ranks whose names differ are told so. Errors:
// ValueError if `function` is empty.
CommHookPtr make_comm_hook(CommHookFunction function, std::string name = "");

// ---- A second collective after the first one of a hook.

// Launches the second collective, given the value of the first, and returns its
// future. What it throws comes out of backward, and ends the group's use: its
// peers wait for the collective.
using NextCollective = std::function<HookFuturePtr(const c10::IValue&)>;

// Returns a future of the value of `next`'s future. A continuation of the first
// future must not launch the second collective: continuations run in another
// order on each rank. `next` is called in the order of the buckets, when
// backward ends and the first collectives are complete.
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

// Updates one parameter by its `.grad`, which holds the reduced gradient in the
// parameter's dtype. Called without recording gradients, once per parameter and
// reduced backward, on the thread that completes the bucket, while backward
// goes on; several buckets may complete at once on several threads. With
// LibTorch's optimizers make one per parameter.
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
// `hook` carries buckets as it would alone: ours, with its wire format, or the
// user's own.
//
// A parameter that no rank used is stepped too, by a gradient of zeros. With
// several local replicas only the first is stepped. An exception of `step`
// comes out of backward() as RuntimeError with its text; the parameters after
// it in its bucket are not stepped. An iteration that fails otherwise may have
// stepped some parameters, the same on all ranks. A rank that has joined
// (join()) does not step; it is given the model when all have run out.
//
// With `is_stepped`, parameters that it is false of get gradients as without
// this hook. A bucket that holds both kinds is an error: give the reducer a
// bucket_plan that keeps them apart.
//
// Errors: ValueError if `hook` is null or `step` empty.
CommHookPtr step_in_backward(CommHookPtr hook, ParameterStep step,
                             ParameterFilter is_stepped = nullptr);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_COMM_HOOKS_H_
