// Shards a LibTorch module of any type, in place.
//
//   auto sharded = brigade::fully_shard(*net, scope.group());
//   torch::optim::AdamW optimizer(net->parameters(), 1e-3);
//   at::Tensor loss =
//       sharded->forward([&] { return loss_of(net->forward(x)); });
//
// The module keeps its type, its names and its parameters, which stay valid in
// optimizers and in code that holds them.

#ifndef BRIGADE_FSDP_FULLY_SHARD_H_
#define BRIGADE_FSDP_FULLY_SHARD_H_

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "brigade/fsdp/fully_shard_options.h"
#include "brigade/fsdp/sharded_model.h"

namespace brigade {

// A module with parameters, below the one that is sharded.
struct UnitCandidate {
  const std::string& name;          // "blocks.2"
  const std::string& type;          // "torch::nn::LinearImpl"
  int64_t numel;                    // that are in no unit inside of it
  const torch::nn::Module* module;  // null: of a script
};

// Which modules are units, and how parameters are treated. Alike on all ranks.
struct UnitSelection {
  // True: the module is a unit. Asked of inner modules first. All other
  // parameters are the outermost unit's. Unset: the children of each Sequential
  // and ModuleList; if there are none, the children of the module.
  std::function<bool(const UnitCandidate&)> is_unit = nullptr;

  // True: the parameter stays whole on each rank, and nothing averages its
  // gradient.
  std::function<bool(const std::string& name, const at::Tensor&)> is_ignored =
      nullptr;

  // Ranks that hold the unit's parameters, where these are not all. Another
  // answer on each rank.
  std::function<std::optional<UnitMesh>(const std::string& unit)> mesh_of =
      nullptr;
};

// A module of one of these types is a unit.
template <typename... Modules>
UnitSelection each_is_unit() {
  return {.is_unit = [](const UnitCandidate& candidate) {
    return (... || (dynamic_cast<const Modules*>(candidate.module) != nullptr));
  }};
}

// Modules are together until they have so many elements.
UnitSelection units_of_size(int64_t numel);

// Collective. The module outlives the result. A parameter that is registered
// later, requires a gradient and is used in forward is an error in the next
// forward. Throws ValueError on all ranks alike if the module has no
// parameters, if an ignored parameter or a buffer shares memory with a sharded
// one, or as make_sharded_units().
std::unique_ptr<ShardedModel> fully_shard(
    const torch::nn::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options = {}, const UnitSelection& selection = {});
std::unique_ptr<ShardedModel> fully_shard(
    const torch::jit::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options = {}, const UnitSelection& selection = {});

// Optimizer state alone is sharded (ZeRO-1): units stay unsharded until their
// shards are written, and a rank has memory for all gradients at once. Call it
// before the first forward.
void shard_optimizer_state(ShardedModel& model);

}  // namespace brigade

#endif  // BRIGADE_FSDP_FULLY_SHARD_H_
