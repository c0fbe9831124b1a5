// Data-parallel training of any LibTorch module: one copy per rank, gradients
// averaged while backward runs. join.h trains on uneven inputs,
// distributed_replicas.h over several copies in one process.
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
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "brigade/ddp/module_access.h"
#include "brigade/ddp/no_sync.h"
#include "brigade/ddp/replicated_module.h"

namespace brigade {

// `Module`: a module holder (torch::nn::Linear, or yours by TORCH_MODULE), a
// std::shared_ptr of a module, or a torch::jit::Module. It is shared, not
// copied: optimizers and serialisation go on using it.
template <typename Module>
class DistributedDataParallel {
 public:
  // Collective: every rank of `group` wraps the same module. Afterwards all
  // hold rank 0's parameters and buffers, but for ignored ones and those of
  // parameter groups. Errors: see ReplicatedModule.
  DistributedDataParallel(Module module,
                          c10::intrusive_ptr<c10d::ProcessGroup> group,
                          DistributedDataParallelOptions options = {})
      : module_(std::move(module)),
        replicated_({replica_of(module_)}, std::move(group),
                    std::move(options)) {}

  // The module's forward, with any arguments and result. The backward that
  // follows averages gradients over the group, unless inside no_sync() or a
  // NoGradGuard. Collective then: every rank calls it equally often. Evaluate
  // on one rank under a NoGradGuard, which communicates nothing.
  //
  // Errors: what the module's forward and ReplicatedModule::run_forward()
  // throw.
  template <typename... Args>
  auto forward(Args&&... args) {
    return replicated_.run_forward([&] {
      return call_module(
          module_, replicated_.argument(std::forward<Args>(args)).get()...);
    });
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // Until the returned guard is destroyed, forwards are not prepared: their
  // backwards accumulate gradients on this rank, and launch nothing. The next
  // forward outside averages the sums.
  [[nodiscard]] NoSync no_sync() { return NoSync(replicated_); }

  // Collective. See ReplicatedModule.
  void sync_buffers() { replicated_.sync_buffers(); }

  Module& module() { return module_; }

  // For its plan, statistics, timeline and errors. Its set_comm_hook() replaces
  // all that carries buckets: parameter groups would then be averaged over the
  // whole group, mixed_precision.reduction is lost, and join() can't divide by
  // kRanksWithData. Give a hook to the constructor instead.
  Reducer& reducer() { return replicated_.reducer(); }

  Joinable& joinable() { return replicated_; }

 private:
  Module module_;
  ReplicatedModule replicated_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_
