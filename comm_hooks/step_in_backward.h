// An optimizer that steps in backward: each parameter is updated as soon as the
// bucket that its gradient travels in has arrived, and its gradient is freed.
//
// Example:
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
// For an optimizer of LibTorch's make one per parameter, and let the functor
// call step() of the one that belongs to its parameter.

#ifndef BRIGADE_COMM_HOOKS_STEP_IN_BACKWARD_H_
#define BRIGADE_COMM_HOOKS_STEP_IN_BACKWARD_H_

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

namespace brigade {

// Updates one parameter by its `.grad`, which holds what `hook` made of it, in
// the parameter's dtype. Called without recording gradients, once per parameter
// and reduced backward, on the thread that completes the bucket, while backward
// goes on: for several parameters one after another within a bucket, and at
// once for several buckets if the backend completes them on several threads.
using ParameterStep = std::function<void(const at::Tensor& parameter)>;
using ParameterFilter = std::function<bool(const at::Tensor& parameter)>;

// `hook` carries buckets as it would alone: ours, with its wire format, or the
// user's own.
//
// A parameter that no rank used is stepped too, by a gradient of zeros. With
// several local replicas only the first is stepped. What `step` throws comes
// out of backward() as RuntimeError with its text; the parameters behind it in
// its bucket are not stepped. An iteration that fails otherwise, on this rank
// or on another, may have stepped some parameters; they are the same on all
// ranks. A rank that has joined (ddp/join.h) does not step; it is given the
// model when all have run out.
//
// With `is_stepped`, parameters that it is false of get gradients as without
// this hook. A bucket that holds both kinds is an error: give the reducer a
// bucket_plan that keeps them apart, and rebuild_buckets = false.
//
// Errors: ValueError if `hook` is null or `step` empty.
std::shared_ptr<c10d::CommHookInterface> step_in_backward(
    std::shared_ptr<c10d::CommHookInterface> hook, ParameterStep step,
    ParameterFilter is_stepped = nullptr);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_STEP_IN_BACKWARD_H_
