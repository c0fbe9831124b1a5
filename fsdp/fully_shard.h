// Fully sharded data parallelism (FSDP) for a LibTorch module of any type, in
// place.
//
//   auto sharded = brigade::fully_shard(*net, scope.group());
//   torch::optim::AdamW optimizer(net->parameters(), 1e-3);
//   at::Tensor loss =
//       sharded->forward([&] { return loss_of(net->forward(x)); });
//
// The module keeps its type, names and parameters. Handles of parameters, for
// example those of an optimizer, stay valid.

#ifndef BRIGADE_FSDP_FULLY_SHARD_H_
#define BRIGADE_FSDP_FULLY_SHARD_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/fsdp/sharded_model.h"

namespace brigade {

// A module with parameters, below the sharded root.
struct UnitCandidate {
  const std::string& name;          // "blocks.2"
  const std::string& type;          // "torch::nn::LinearImpl"
  int64_t numel;                    // without units inside this module
  const torch::nn::Module* module;  // null for a ScriptModule
};

// Division of a module into units. Identical on all ranks, except for mesh_of.
struct UnitSelection {
  // True: the module is a unit. Called for children before their parent. The
  // root unit gets all other parameters. Unset: the children of each Sequential
  // and ModuleList; without any, the children of the root.
  std::function<bool(const UnitCandidate&)> is_unit = nullptr;

  // True: the parameter is not sharded, and its gradient is not reduced.
  std::function<bool(const std::string& name, const at::Tensor&)> is_ignored =
      nullptr;

  // Returns the ranks that hold the unit; nullopt: all.
  std::function<std::optional<UnitMesh>(const std::string& unit)> mesh_of =
      nullptr;
};

// Makes a unit of each module of one of these types.
template <typename... Modules>
UnitSelection each_is_unit() {
  return {.is_unit = [](const UnitCandidate& candidate) {
    return (... || (dynamic_cast<const Modules*>(candidate.module) != nullptr));
  }};
}

// Makes a unit of each module that has at least `numel` elements outside of
// other units.
UnitSelection units_of_size(int64_t numel);

// Shards the parameters of `module`, which outlives the result. Collective.
//
// Throws ValueError on all ranks, before any parameter changes, if:
//   - parameters, units or options differ between ranks or are invalid;
//   - the module has no parameters;
//   - a parameter is sharded already, not dense or not a leaf;
//   - a sharded parameter shares memory with a parameter of another unit, an
//     ignored parameter or a buffer.
// A forward throws if a trainable parameter was registered after this call.
std::unique_ptr<ShardedModel> fully_shard(
    const torch::nn::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options = {}, const UnitSelection& selection = {});
std::unique_ptr<ShardedModel> fully_shard(
    const torch::jit::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options = {}, const UnitSelection& selection = {});

// Returns `options` for hybrid sharding: each host is a shard group, and the
// hosts hold replicas. A value of `options.num_shards` stays. Collective.
FullyShardOptions hybrid_shard(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options);

// Shards only optimizer state (ZeRO-1): units stay unsharded until their shards
// are written, and a rank allocates all unsharded gradients at once. Call
// before the first forward.
void shard_optimizer_state(ShardedModel& model);

}  // namespace brigade

#endif  // BRIGADE_FSDP_FULLY_SHARD_H_
