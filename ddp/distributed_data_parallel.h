// Data-parallel training of any LibTorch module: one copy per rank, gradients
// averaged while backward runs.
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
// Ranks with unequally many batches put the loop into join().
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

// Forward runs on copies of the parameters in `parameters`, and floating-point
// tensors among its arguments are cast to it; outputs stay in it. Outside of
// forward parameters and gradients have their own precision
// (hooks/parameter_casts.h). Ignored parameters stay as they are.
//
// - Arguments are cast in vectors, arrays, maps, pairs, tuples, optionals and
//   IValues; structs and references inside of these are passed on as they are.
//   A change of an argument in forward may be made in a copy.
// - kHalf needs losses that are scaled; there is no loss scaling here.
// - checkpoint() inside of forward is refused while an optimizer steps in
//   backward, and if parameters are on several devices. A comm hook of your own
//   that writes to parameters must not meet checkpoints either.
struct MixedPrecision {
  at::ScalarType parameters = at::kBFloat16;
  // Of gradients as they travel, if it is smaller than their own; unset: as
  // `parameters`. Not with a comm hook, which decides itself.
  std::optional<at::ScalarType> reduction = std::nullopt;
  // Floating-point buffers are cast once, by the constructor; unset: they stay.
  // LibTorch's batch norm on the CPU needs them in `parameters`.
  std::optional<at::ScalarType> buffers = std::nullopt;
};

struct DistributedDataParallelOptions {
  // Its lists (bucket_plan, parameter_names, expect_sparse_gradients) are of
  // the parameters that require a gradient and are not ignored, in registration
  // order, each once. Names are taken from the module unless given.
  ReducerOptions reducer = {};

  // A forward that will be reduced begins with the buffers of rank 0, or of the
  // lowest rank with data while ranks join: one collective per dtype. If false,
  // each rank keeps its own; sync_buffers() makes them equal when asked.
  bool broadcast_buffers = true;

  // Names of parameters and buffers that each rank keeps to itself: not
  // compared, not made equal, not reduced.
  std::vector<std::string> ignored = {};

  // Unset: forward runs in the parameters' own precision.
  std::optional<MixedPrecision> mixed_precision = std::nullopt;
};

// The divisor of gradients while some ranks have no data.
enum class JoinDivisor {
  kWorldSize,      // inputs of equal size keep their weight to the end
  kRanksWithData,  // the average over the ranks that have data
};

// The part of DistributedDataParallel that is the same for all module types.
class ReplicatedModule {
 public:
  // Collective. Verifies that all ranks hold the same module, then gives every
  // rank the parameters and buffers of rank 0, but for ignored ones.
  //
  // Errors: ValueError on every rank if one has no parameter that requires a
  // gradient, or options that name what it does not have, or if parameters or
  // buffers differ across ranks in number, name, shape, strides, dtype or
  // requires_grad; and what Reducer's constructor throws.
  ReplicatedModule(std::shared_ptr<const torch::nn::Module> module,
                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                   DistributedDataParallelOptions options);
  ReplicatedModule(torch::jit::Module module,
                   c10::intrusive_ptr<c10d::ProcessGroup> group,
                   DistributedDataParallelOptions options);
  ~ReplicatedModule();
  ReplicatedModule(const ReplicatedModule&) = delete;
  ReplicatedModule& operator=(const ReplicatedModule&) = delete;

  // Calls `forward`, which returns the tensors in its outputs, and prepares the
  // reducer for a backward through them, unless gradients are not recorded or
  // not synchronized. Collective then: the same number of calls on every rank.
  //
  // Errors: RuntimeError if the module got other parameters since it was
  // wrapped; what `forward`, Reducer::barrier() and
  // Reducer::prepare_for_backward() throw. In mixed precision RuntimeError if
  // `forward` writes to a parameter, which would be lost, or freezes or
  // unfreezes one.
  void run_forward(c10::function_ref<std::vector<at::Tensor>()> forward);

  // Of mixed precision: the dtype that floating-point arguments are cast to.
  std::optional<at::ScalarType> forward_dtype() const;

  // While off, backward accumulates gradients on this rank only.
  bool synchronizes() const;
  void set_synchronizes(bool value);

  // Collective, not in forward or backward: gives every rank the buffers of
  // rank 0, or of the lowest rank with data while ranks join. After the last
  // forward each rank has updated its own.
  //
  // Errors: what Reducer::barrier() throws; PeerError, and
  // reducer().can_continue() is false then.
  void sync_buffers();

  Reducer& reducer();

 private:
  friend void join(std::span<ReplicatedModule* const> models,
                   const std::function<void()>& loop, JoinDivisor divisor);

  class State;
  const std::unique_ptr<State> state_;
};

// Until it ends, gradients accumulate without being reduced. Scopes may nest;
// each restores what it found. Must not outlive the module.
class NoSync {
 public:
  explicit NoSync(ReplicatedModule& module)
      : module_(module), was_on_(module.synchronizes()) {
    module_.set_synchronizes(false);
  }
  ~NoSync() { module_.set_synchronizes(was_on_); }

  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  ReplicatedModule& module_;
  const bool was_on_;
};

// `Module`: a module holder (torch::nn::Linear, or yours by TORCH_MODULE), a
// std::shared_ptr of a module, or a torch::jit::Module. Shared, not copied.
template <typename Module>
class DistributedDataParallel {
 public:
  // Collective. See ReplicatedModule.
  DistributedDataParallel(Module module,
                          c10::intrusive_ptr<c10d::ProcessGroup> group,
                          DistributedDataParallelOptions options = {})
      : module_(std::move(module)),
        replicated_(base_of(module_), std::move(group), std::move(options)) {}

  // The module's forward, with any arguments and result; a script module takes
  // its arguments one by one, or as one vector of IValues. The backward that
  // follows averages gradients over the group, unless inside no_sync() or a
  // NoGradGuard. Collective then. Evaluate on one rank under a NoGradGuard,
  // which communicates nothing. Errors: as ReplicatedModule::run_forward().
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

  // Until the returned guard is destroyed, backwards accumulate gradients on
  // this rank. The next one outside averages the sums.
  [[nodiscard]] NoSync no_sync() { return NoSync(replicated_); }

  // Collective. See ReplicatedModule.
  void sync_buffers() { replicated_.sync_buffers(); }

  Module& module() { return module_; }

  // For its plan, statistics, timeline and errors. After its set_comm_hook()
  // mixed_precision.reduction is lost, and join() can't divide by
  // kRanksWithData. Give a hook to the constructor instead.
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

// Trains on uneven inputs: ranks that have run out shadow their peers.
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
// Collective. Calls `loop`. When it has returned, a rank launches whatever its
// peers launch, on zeros, until all loops have returned. Then every rank gets
// the model of the lowest rank that had data last. States of optimizers are not
// copied: save_checkpoint() on that rank and load_checkpoint() on all ranks do
// that. An exception of `loop` passes through, and this rank shadows nobody;
// its peers learn of it as they do without join(). An error of an iteration
// ends join() on every rank: a loop that catches one and goes on trains with
// nobody.
//
// With several models, of one process group, the first one announces
// iterations; in every iteration each is used, in the order of the list, one
// being done before the next one begins. A forward that will be reduced is
// followed by its backward.
//
// Source: torch.distributed.algorithms.join. Differs: model and buffers are
// those of the lowest rank that has data, there of the highest.
//
// Errors: ValueError if there is no model, if they are of several groups, if
// ranks with data are to be counted under a comm hook that averages by itself,
// or if ranks give other divisors; RuntimeError if one is being joined already
// or is used before the first of the list; what the models throw.
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
