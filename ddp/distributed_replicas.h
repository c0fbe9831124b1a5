// Data-parallel training of several copies of a module in one process, one per
// device for instance, and over ranks.
//
// Example, for a process with two devices:
//
//   DistributedReplicas<Net> model({net_on_0, net_on_1}, group);
//   std::vector<at::Tensor> outputs = model({input_on_0, input_on_1});
//   (loss(outputs[0]).to(device_1) + loss(outputs[1])).backward();
//
// All copies start equal. After a backward over the outputs of all of them,
// each has the average gradient over the copies of all ranks. Give each its own
// optimizer, or one optimizer all parameters.
//
// Copies run one after another; work for several devices overlaps as far as it
// is queued without waiting.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_DISTRIBUTED_REPLICAS_H_
#define BRIGADE_DDP_DISTRIBUTED_REPLICAS_H_

#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/ddp/module_access.h"
#include "brigade/ddp/no_sync.h"
#include "brigade/ddp/replicated_module.h"

namespace brigade {

// `Module`: as for DistributedDataParallel.
template <typename Module>
class DistributedReplicas {
 public:
  // Collective: every rank wraps equally many copies of the same module.
  // Afterwards all hold what copy 0 of rank 0 held.
  //
  // Errors: ValueError if there is no copy; see ReplicatedModule.
  DistributedReplicas(std::vector<Module> modules,
                      c10::intrusive_ptr<c10d::ProcessGroup> group,
                      DistributedDataParallelOptions options = {})
      : modules_(std::move(modules)),
        replicated_(replicas_of(modules_), std::move(group),
                    std::move(options)) {}

  // Calls each copy's forward with its tuple of arguments; returns its result
  // in its place.
  //
  // Errors: ValueError if there is not one tuple per copy; what
  // DistributedDataParallel::forward() throws.
  template <typename... Args>
  auto forward(const std::vector<std::tuple<Args...>>& inputs) {
    return forward_each(inputs.size(), [&](size_t i) {
      return std::apply(
          [&](const Args&... args) {
            return call_module(modules_[i],
                               replicated_.argument(args).get()...);
          },
          inputs[i]);
    });
  }

  // The same for a forward of one argument.
  auto forward(const std::vector<at::Tensor>& inputs) {
    return forward_each(inputs.size(), [&](size_t i) {
      return call_module(modules_[i], replicated_.argument(inputs[i]).get());
    });
  }

  template <typename Inputs>
  auto operator()(const Inputs& inputs) {
    return forward(inputs);
  }
  auto operator()(std::initializer_list<at::Tensor> inputs) {
    return forward(std::vector<at::Tensor>(inputs));
  }

  // As DistributedDataParallel::no_sync().
  [[nodiscard]] NoSync no_sync() { return NoSync(replicated_); }

  std::vector<Module>& modules() { return modules_; }
  // See DistributedDataParallel.
  Reducer& reducer() { return replicated_.reducer(); }
  Joinable& joinable() { return replicated_; }

 private:
  static std::vector<ModuleReplica> replicas_of(
      const std::vector<Module>& modules) {
    TORCH_CHECK_VALUE(!modules.empty(),
                      "DistributedReplicas needs at least 1 module, got 0");
    std::vector<ModuleReplica> replicas;
    for (const Module& module : modules) {
      replicas.push_back(replica_of(module));
    }
    return replicas;
  }

  template <typename Call>
  auto forward_each(size_t num_inputs, const Call& call) {
    TORCH_CHECK_VALUE(num_inputs == modules_.size(),
                      "DistributedReplicas::forward: expected one input for "
                      "each of ",
                      modules_.size(), " copies, got ", num_inputs);
    return replicated_.run_forward([&] {
      std::vector<decltype(call(0))> outputs;
      outputs.reserve(modules_.size());
      for (size_t i = 0; i < modules_.size(); ++i) outputs.push_back(call(i));
      return outputs;
    });
  }

  std::vector<Module> modules_;
  ReplicatedModule replicated_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_DISTRIBUTED_REPLICAS_H_
