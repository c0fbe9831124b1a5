// Data-parallel training of any LibTorch module: each rank holds a copy, and
// gradients are averaged during backward.
//
// Example:
//
//   brigade::GroupScope scope(brigade::init_process_group());
//   torch::nn::Linear net(8, 2);
//   brigade::DistributedDataParallel model(net, scope.group());
//   torch::optim::SGD optimizer(net->parameters(), 0.1);
//   for (const auto& [input, target] : batches_of_this_rank) {
//     optimizer.zero_grad();
//     torch::mse_loss(model(input), target).backward();  // gradients averaged
//     optimizer.step();
//   }
//
// If ranks have different numbers of batches, run the loop inside join().
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/FunctionRef.h>
#include <torch/nn/module.h>
#include <torch/script.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "brigade/hooks/nested_tensors.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

// Dtypes of mixed precision. Forward uses copies of the parameters and of its
// floating-point arguments, cast to `parameters`; outputs have that dtype.
// Outside of forward, parameters and gradients have their own dtype. Ignored
// parameters are not cast.
//
// - Arguments are cast inside vectors, arrays, maps, pairs, tuples, optionals
//   and IValues, but not inside structs and through references. An in-place
//   change of an argument in forward may change a copy only.
// - Scale the loss yourself with kHalf; there is no loss scaling.
// - checkpoint() throws in forward if an optimizer steps in backward, or if
//   parameters are on several devices. Do not combine it with your own comm
//   hook that writes to parameters.
struct MixedPrecision {
  at::ScalarType parameters = at::kBFloat16;
  // Dtype of the gradients in all-reduces, if smaller than their own; unset: as
  // `parameters`. Must be unset with a comm hook, which chooses its own.
  std::optional<at::ScalarType> reduction = std::nullopt;
  // The constructor casts floating-point buffers to it; unset: no cast.
  // LibTorch's batch norm on CPUs requires the same dtype as `parameters`.
  std::optional<at::ScalarType> buffers = std::nullopt;
};

struct DistributedDataParallelOptions {
  // bucket_plan, parameter_names and expect_sparse_gradients refer to the
  // parameters that require a gradient and are not ignored, in registration
  // order, each once. Default of parameter_names: the module's names.
  ReducerOptions reducer = {};

  // Plans buckets for this model and its links in the first 10 iterations, and
  // keeps them if they are faster (reducer/auto_plan.h); rank 0 prints the
  // result to stderr. Needs up to 64 MiB. Unset: true if bits don't depend on
  // the plan (2 ranks, `reproducible`, or ranks that share memory), the default
  // is not a single bucket, and neither bucket_cap_bytes, bucket_plan nor a
  // comm hook is set. If true elsewhere, set bucket_plan to reducer().plan() of
  // an earlier run for equal bits.
  std::optional<bool> auto_plan = std::nullopt;

  // Before each forward that will be reduced, broadcasts the buffers of rank 0
  // (inside join(): of the lowest rank with data), with one collective per
  // dtype. If false, call sync_buffers() where ranks need equal buffers.
  bool broadcast_buffers = true;

  // Names of parameters and buffers that are not compared, broadcast or
  // reduced.
  std::vector<std::string> ignored = {};

  std::optional<MixedPrecision> mixed_precision = std::nullopt;
};

// The divisor of gradients while some ranks have no data.
enum class JoinDivisor {
  kWorldSize,      // every input keeps the same weight until the end
  kRanksWithData,  // gradients are averages over the ranks with data
};

// Part of DistributedDataParallel that does not depend on the module's type.
class ReplicatedModule {
 public:
  // Collective. Verifies that all ranks have the same module, then broadcasts
  // the parameters and buffers of rank 0, except ignored ones.
  //
  // Errors: ValueError on every rank if a rank has no parameter that requires a
  // gradient; if `ignored` has an unknown name; or if parameters or buffers
  // differ across ranks in number, name, shape, strides, dtype or
  // requires_grad. Also throws the errors of Reducer's constructor.
  ReplicatedModule(std::shared_ptr<const torch::nn::Module> module,
                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                   DistributedDataParallelOptions options);
  ReplicatedModule(torch::jit::Module module,
                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                   DistributedDataParallelOptions options);
  ~ReplicatedModule();
  ReplicatedModule(const ReplicatedModule&) = delete;
  ReplicatedModule& operator=(const ReplicatedModule&) = delete;

  // Calls `forward`, which returns its output tensors, and prepares the reducer
  // for a backward through them. Collective: every rank makes the same number
  // of calls. Without grad mode or gradient synchronization it does not prepare
  // the reducer, and is not collective.
  //
  // Errors: RuntimeError if the module's parameters have changed since
  // construction; in mixed precision also if `forward` writes, freezes or
  // unfreezes a parameter. Also throws the errors of `forward`,
  // Reducer::barrier() and Reducer::prepare_for_backward().
  void run_forward(c10::function_ref<std::vector<at::Tensor>()> forward);

  // Dtype that mixed precision casts floating-point arguments to.
  std::optional<at::ScalarType> forward_dtype() const;

  // If false, backward accumulates gradients on this rank, without reduction.
  bool requires_gradient_sync() const;
  void set_requires_gradient_sync(bool value);

  // Collective, outside of forward and backward: broadcasts the buffers of rank
  // 0 (inside join(): of the lowest rank with data). Use it after the last
  // forward, in which each rank has updated its own buffers.
  //
  // Errors: those of Reducer::barrier(). PeerError if communication fails;
  // reducer().can_continue() is false then.
  void sync_buffers();

  Reducer& reducer();

 private:
  friend void join(std::span<ReplicatedModule* const> models,
                   const std::function<void()>& loop, JoinDivisor divisor);

  class State;
  const std::unique_ptr<State> state_;
};

// Scope of gradient accumulation without reduction. Scopes may nest; each
// restores the previous setting. Must not outlive the module.
class NoSync {
 public:
  explicit NoSync(ReplicatedModule& module)
      : module_(module), previous_(module.requires_gradient_sync()) {
    module_.set_requires_gradient_sync(false);
  }
  ~NoSync() { module_.set_requires_gradient_sync(previous_); }

  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  ReplicatedModule& module_;
  const bool previous_;
};

// Data-parallel wrapper of a module, which it shares. `Module`: a module holder
// (torch::nn::Linear, or one that TORCH_MODULE defines), a std::shared_ptr to a
// module, or a torch::jit::Module.
template <typename Module>
class DistributedDataParallel {
 public:
  // Collective. See ReplicatedModule.
  DistributedDataParallel(Module module,
                          c10::intrusive_ptr<c10d::ProcessGroup> group,
                          DistributedDataParallelOptions options = {})
      : module_(std::move(module)),
        replicated_(base_of(module_), std::move(group), std::move(options)) {}

  // Calls the module's forward, with any arguments and result. A script module
  // takes its arguments separately, or as one vector of IValues.
  //
  // Collective: the next backward averages gradients over the group. Inside
  // no_sync() or under a NoGradGuard nothing is communicated, so one rank may
  // evaluate alone. Errors: those of ReplicatedModule::run_forward().
  template <typename... Args>
  auto forward(Args&&... args) {
    const auto run = [&] {
      return call(ForwardArgument<Args>(std::forward<Args>(args),
                                        replicated_.forward_dtype())
                      .get()...);
    };
    std::optional<decltype(run())> outputs;
    replicated_.run_forward([&] {
      outputs.emplace(run());
      return tensors_of(*outputs);
    });
    return *std::move(outputs);
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // The next backward after the scope averages the accumulated gradients.
  [[nodiscard]] NoSync no_sync() { return NoSync(replicated_); }

  // Collective. See ReplicatedModule.
  void sync_buffers() { replicated_.sync_buffers(); }

  Module& module() { return module_; }

  // Pass a comm hook to the constructor instead of its set_comm_hook(): after
  // that, mixed_precision.reduction has no effect and join() throws for
  // kRanksWithData.
  Reducer& reducer() { return replicated_.reducer(); }

  ReplicatedModule& replicated() { return replicated_; }

 private:
  static constexpr bool kIsScript =
      std::is_base_of_v<torch::jit::Module, Module>;

  static auto base_of(const Module& module) {
    if constexpr (kIsScript) {
      return static_cast<const torch::jit::Module&>(module);
    } else if constexpr (requires { module.ptr(); }) {
      return std::shared_ptr<const torch::nn::Module>(module.ptr());
    } else {
      return std::shared_ptr<const torch::nn::Module>(module);
    }
  }

  template <typename... Args>
  auto call(Args&&... args) {
    if constexpr (!kIsScript) {
      return module_->forward(std::forward<Args>(args)...);
    } else if constexpr (sizeof...(Args) == 1 &&
                         (std::is_same_v<std::remove_cvref_t<Args>,
                                         std::vector<c10::IValue>> &&
                          ...)) {
      return module_.forward(std::forward<Args>(args)...);
    } else {
      return module_.forward(
          std::vector<c10::IValue>{c10::IValue(std::forward<Args>(args))...});
    }
  }

  Module module_;
  ReplicatedModule replicated_;
};

// Trains on uneven inputs: ranks that have run out of data shadow their peers.
//
//   DistributedDataParallel model(net, group);
//   join(model, [&] {
//     for (const auto& [input, target] : batches_of_this_rank) {
//       optimizer.zero_grad();
//       loss(model(input), target).backward();
//       optimizer.step();
//     }
//   });
//
// Collective. Calls `loop`. A rank whose loop has returned shadows the others:
// it launches their collectives on zeros until all loops have returned. Then
// the lowest of the ranks that had data last broadcasts its model. Optimizer
// states are not broadcast: use save_checkpoint() on that rank and
// load_checkpoint() on all ranks.
//
// An exception of `loop` propagates, and this rank does not shadow; its peers
// fail as they do without join(). An error in an iteration ends join() on every
// rank. Do not catch it inside `loop`: the peers have left join().
//
// Several models must share one process group. Each iteration uses every model
// once, in the order of `models`: a forward, then its backward, before the next
// model.
//
// Source: torch.distributed.algorithms.join. Differs: the lowest rank with data
// provides the model and buffers; in torch the highest.
//
// Errors: ValueError if there is no model, the models have different groups,
// kRanksWithData is combined with a user's comm hook, or ranks pass different
// divisors. RuntimeError if a model is inside another join(), or is used before
// the first model. Also throws the models' errors.
void join(std::span<ReplicatedModule* const> models,
          const std::function<void()>& loop,
          JoinDivisor divisor = JoinDivisor::kWorldSize);

template <typename Module>
void join(DistributedDataParallel<Module>& model,
          const std::function<void()>& loop,
          JoinDivisor divisor = JoinDivisor::kWorldSize) {
  ReplicatedModule* const models[] = {&model.replicated()};
  join(std::span<ReplicatedModule* const>(models), loop, divisor);
}

}  // namespace brigade

#endif  // BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_
