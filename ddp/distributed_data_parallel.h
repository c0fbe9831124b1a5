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
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_
#define BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_

#include <torch/script.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "brigade/ddp/module_tensors.h"
#include "brigade/ddp/no_sync.h"
#include "brigade/ddp/replicated_module.h"
#include "brigade/hooks/output_tensors.h"

namespace brigade {

// `Module`: a module holder (torch::nn::Linear, or yours by TORCH_MODULE), a
// std::shared_ptr of a module, or a torch::jit::Module. It is shared, not
// copied: optimizers and serialisation go on using it.
template <typename Module>
class DistributedDataParallel {
 public:
  // Collective: every rank of `group` wraps the same module. Afterwards all
  // hold rank 0's parameters and buffers. Errors: see ReplicatedModule.
  DistributedDataParallel(Module module,
                          c10::intrusive_ptr<c10d::ProcessGroup> group,
                          DistributedDataParallelOptions options = {})
      : module_(std::move(module)),
        replicated_(tensors_of(module_), buffers_of(module_), std::move(group),
                    std::move(options)) {}

  // The module's forward, with any arguments and result. The backward that
  // follows averages gradients over the group, unless inside no_sync() or a
  // NoGradGuard.
  //
  // Errors: what the module's forward and Reducer::prepare_for_backward throw.
  template <typename... Args>
  auto forward(Args&&... args) {
    replicated_.before_forward();
    auto outputs = call(std::forward<Args>(args)...);
    replicated_.after_forward(brigade::tensors_of(outputs));
    return outputs;
  }

  template <typename... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

  // Until the returned guard is destroyed, forwards are not prepared: their
  // backwards accumulate gradients on this rank, and launch nothing. The next
  // forward outside averages the sums.
  [[nodiscard]] NoSync no_sync() { return NoSync(replicated_); }

  Module& module() { return module_; }
  Reducer& reducer() { return replicated_.reducer(); }

 private:
  static constexpr bool kIsScript =
      std::is_base_of_v<torch::jit::Module, Module>;

  static ModuleTensors tensors_of(const Module& module) {
    if constexpr (kIsScript) {
      return tensors_of_module(module);
    } else {
      return tensors_of_module(static_cast<const torch::nn::Module&>(*module));
    }
  }

  // An nn::Module changes its buffers in place; a script module may replace
  // them.
  static ReplicatedModule::BufferLookup buffers_of(const Module& module) {
    if constexpr (kIsScript) {
      return [module] {
        std::vector<at::Tensor> buffers;
        for (const at::Tensor& buffer : module.buffers()) {
          buffers.push_back(buffer);
        }
        return buffers;
      };
    } else {
      return [buffers = module->buffers()] { return buffers; };
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

}  // namespace brigade

#endif  // BRIGADE_DDP_DISTRIBUTED_DATA_PARALLEL_H_
