// Comm hooks, which reduce a bucket's gradients across ranks.
//
//   // Sums without averaging.
//   auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
//     std::vector<at::Tensor> tensors = {bucket.getBuffer()};
//     return group->allreduce(tensors)->getFuture();
//   });
//   Reducer reducer(parameters, group, {.comm_hook = hook});
//
// The hooks below do not own their group; yours may.

#ifndef BRIGADE_COMM_HOOKS_COMM_HOOKS_H_
#define BRIGADE_COMM_HOOKS_COMM_HOOKS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

namespace brigade {

using CommHookPtr = std::shared_ptr<c10d::CommHookInterface>;
using HookFuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// ---- Built-in hooks: averages over the ranks of `group`. Errors: ValueError
// if it is null.

// All-reduces gradients in their own dtype.
CommHookPtr all_reduce_hook(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Sends half the bytes of float32; gradients above 65504 become infinite.
// Divides before the cast (torch's fp16_compress_hook: after it), so that a sum
// overflows only if the average does.
CommHookPtr fp16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Sends half the bytes of float32, with its range and 8 bits of precision.
CommHookPtr bf16_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Sums in rank order, so that the bits do not depend on the buckets, like
// ReducerOptions::reproducible. Collective. A sparse gradient is a ValueError
// in backward. Errors: as OrderedCollectives'.
CommHookPtr ordered_hook(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// ---- A hook made of a function

// The contract of every hook, brigade's or c10d's (docs/guides/comm_hooks.md):
//
// - The bucket's buffer holds this rank's undivided gradients (with several
//   local replicas: their mean) in the parameters' dtype: 1D, [numel]; complex
//   gradients as pairs of reals, [2 * numel]; a sparse gradient as a COO tensor
//   of the parameter's shape.
// - The future holds the reduced buffer, or a list of it: the same number of
//   elements (sparse: the same shape) on the same device, in any floating-point
//   dtype. It may be the bucket's own buffer. None: the hook has consumed the
//   gradients, and none are delivered.
// - On a rank without more data, or whose backward has failed, the hook runs
//   on zeros. Its state must tolerate that.
// - Hooks run in plan order, equal on all ranks, with the engine's lock held: a
//   hook must not call the reducer. Thread-local state is that of the thread
//   that prepared the backward, with grad mode and autocast off.
// - backward() throws the exceptions of the hook and of its future's callbacks,
//   with bucket, iteration and rank added: a c10::Error keeps its type, others
//   become RuntimeError. The other ranks throw an error that names this rank.
//   No rank delivers gradients. Training can continue unless the hook had
//   launched a collective: see Reducer::can_continue().
using CommHookFunction = std::function<HookFuturePtr(c10d::GradBucket&)>;

// `name`: for messages; compared across ranks. Empty: the type of `function`.
// Errors: ValueError if `function` is empty.
CommHookPtr make_comm_hook(CommHookFunction function, std::string name = "");

// ---- Second collectives of a hook

// Launches the second collective, given the value of the first, and returns its
// future. Its exceptions are thrown by backward() and make the group unusable.
using NextCollective = std::function<HookFuturePtr(const c10::IValue&)>;

// Returns a future for the value of `next`'s future. `next` is called at the
// end of backward, in the order of the buckets: callbacks of the first future
// would run in another order on each rank.
//
//   // Averages in float16, scaled by the largest element of all ranks.
//   auto hook = make_comm_hook([group](c10d::GradBucket& bucket) {
//     const at::Tensor buffer = bucket.getBuffer();
//     std::vector<at::Tensor> scale = {
//         buffer.abs().amax().clamp_min(1e-30).view({1})};
//     const auto largest =
//         group->allreduce(scale, {.reduceOp = c10d::ReduceOp::MAX});
//     return then_collective(largest->getFuture(), [=](const c10::IValue&) {
//       std::vector<at::Tensor> sent = {(buffer / scale[0]).to(at::kHalf)};
//       const int size = group->getSize();
//       return group->allreduce(sent)->getFuture()->then(
//           [=](auto&) { return c10::IValue(sent[0] * (scale[0] / size)); },
//           c10::TensorType::get());
//     });
//   });
//
// A function that is passed to then() must not hold the group: it is destroyed
// on a thread of the group, which can't end its own group.
//
// Call it on the thread that runs the hook. Outside of a reducer's hook, waits
// for `first` and calls `next` at once.
HookFuturePtr then_collective(HookFuturePtr first, NextCollective next);

// The then_collective() calls of one iteration. For reducers.
//
// Thread safety: none.
class ChainedCollectives {
 public:
  // During the scope, then_collective() on this thread adds to `collectives`.
  class Scope {
   public:
    explicit Scope(ChainedCollectives& collectives);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ChainedCollectives* const before_;
  };

  bool empty() const { return chains_.empty(); }

  // Launches the second collectives in the order of their addition, each inside
  // a call of `count`, which must call its argument. A failed first collective
  // passes its error on.
  //
  // Throws the error of a launch, or RuntimeError if a first collective is not
  // complete within `timeout`; the rest is cancelled then.
  void launch(std::chrono::milliseconds timeout,
              const std::function<void(const std::function<void()>&)>& count);

  // Ends the futures of all second collectives with an error. Waits up to
  // `timeout` for each first collective.
  void cancel(std::chrono::milliseconds timeout);

 private:
  friend HookFuturePtr then_collective(HookFuturePtr first,
                                       NextCollective next);

  struct Chain {
    HookFuturePtr first;
    NextCollective next;
    HookFuturePtr result;
  };

  std::vector<Chain> chains_;
};

// Detects collectives that callbacks of futures launch on Gloo's threads. For
// reducers, in the first iterations of a hook only: it observes all operations
// of the process, at about 100 ns each.
//
// Thread safety: made and destroyed by one thread.
class ContinuationWatch {
 public:
  ContinuationWatch();
  ~ContinuationWatch();
  ContinuationWatch(const ContinuationWatch&) = delete;
  ContinuationWatch& operator=(const ContinuationWatch&) = delete;

  // Returns true if the process has launched any since construction.
  bool has_seen_any() const;

 private:
  const int64_t seen_before_;
  const at::CallbackHandle handle_;
};

// ---- An optimizer that steps in backward

// Updates one parameter by its `.grad`, the reduced gradient in the parameter's
// dtype. Called with grad mode off, once per parameter and reduced backward, on
// the threads that complete buckets. LibTorch's optimizers need one instance
// per parameter.
using ParameterStep = std::function<void(const at::Tensor& parameter)>;
using ParameterFilter = std::function<bool(const at::Tensor& parameter)>;

// Makes a hook that steps each parameter when its bucket has been reduced, and
// frees its gradient.
//
//   auto step = [](const at::Tensor& parameter) {
//     at::Tensor target = parameter;
//     target.sub_(parameter.grad(), 0.1);
//   };
//   ReducerOptions reducer = {
//       .comm_hook = step_in_backward(all_reduce_hook(group), step)};
//   DistributedDataParallel model(net, group, {.reducer = reducer});
//   loss(model(input), target).backward();  // includes the step
//
// `hook` reduces the buckets. A parameter that no rank used is stepped with a
// gradient of zeros. With several local replicas only the first is stepped. A
// rank that has joined (join()) does not step; it receives the model at the
// end.
//
// backward() throws an exception of `step` as RuntimeError with its text; later
// parameters of its bucket are not stepped. An iteration that fails otherwise
// may have stepped some parameters, the same on all ranks.
//
// Parameters for which `is_stepped` returns false get gradients as usual. A
// bucket with both kinds is an error: separate them by a bucket_plan.
//
// Errors: ValueError if `hook` is null or `step` empty.
CommHookPtr step_in_backward(CommHookPtr hook, ParameterStep step,
                             ParameterFilter is_stepped = nullptr);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_COMM_HOOKS_H_
