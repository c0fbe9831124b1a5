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
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <variant>
#include <vector>

#include "brigade/fsdp/sharded_model.h"

namespace brigade {

// ---- Options.

// Comm hook of sharding: replaces the reduce-scatter of a unit's gradients.
//
//   class Clipped : public ReductionHook {
//     FuturePtr reduce(const Reduction& reduction) override {
//       reduction.whole.clamp_(-1, 1);
//       return reduction.sum(reduction.whole, reduction.shard);
//     }
//     std::string hook_name() const override { return "clipped"; }
//   };
//
// Every rank calls its hook for the same units in the same order, one call at a
// time. A rank that has not used a unit passes zeros.
class ReductionHook {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  // Gradients of one unit in a shard group of F ranks, S elements per shard.
  struct Reduction {
    std::string unit;  // its name
    size_t index = 0;  // of the unit, identical on all ranks
    at::Tensor whole;  // [F * S]: this rank's unsharded gradients; writable
    at::Tensor shard;  // [S], of the dtype of `whole`: receives the sum
    int rank = 0;      // in the shard group; `shard` is this chunk of `whole`

    // Reduce-scatter of `whole` [F * S] into `shard` [S], scaled, over all
    // ranks. Both tensors have one floating dtype, any.
    std::function<FuturePtr(const at::Tensor& whole, const at::Tensor& shard)>
        sum = {};
  };

  virtual ~ReductionHook() = default;

  // Writes the scaled sum into `shard`; calls `sum` exactly once. Owns `whole`
  // and `shard` until the returned future is complete. On devices with streams,
  // launches on the current stream and returns a complete future.
  //
  // Other collectives need a process group that nothing else uses, and must be
  // identical on all ranks. Throws only before its first collective; an
  // exception ends the iteration.
  virtual FuturePtr reduce(const Reduction& reduction) = 0;

  // Appears in messages; compared across ranks.
  virtual std::string hook_name() const = 0;

  // True if reduce() and its future fail only when the network fails.
  virtual bool fails_by_network_only() const { return false; }
};

// Returns a hook that reduces gradients in `wire_dtype`, in rank order
// (rounding: comm/ordered/ordered_collectives.h). Gradients are stored and
// accumulated in the reduce dtype. Needs no extra memory. Complex gradients,
// and those with elements no longer than `wire_dtype`, are not compressed.
//
// Errors: ValueError unless `wire_dtype` is float16 or bfloat16.
std::shared_ptr<ReductionHook> compression_hook(at::ScalarType wire_dtype);

// Options of fully_shard(), compared across ranks.
struct FullyShardOptions {
  // Size of the shard group; divides the world size. Each run of `num_shards`
  // consecutive ranks is a replica of the model. 1: no sharding. Unset: all
  // ranks.
  std::optional<int> num_shards = std::nullopt;

  // True: units are resharded after their forward and unsharded again for their
  // backward (ZeRO-3). False: they stay unsharded in between (ZeRO-2; as much
  // memory as data parallelism). A number: they are resharded to this many
  // consecutive ranks, for example those of a host. It is more than 1 and
  // divides the number of shards. ZeRO-1: shard_optimizer_state().
  std::variant<bool, int> reshard_after_forward = true;

  // All-gathers issued ahead of the unit in use.
  size_t prefetch_depth = 1;

  // Dtype of parameters in forward and backward. Unset: their own, which
  // optimizers always see.
  std::optional<at::ScalarType> param_dtype = std::nullopt;

  // Dtype in which gradients are summed. Unset: the parameters' own.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;

  // Dtype to which floating outputs of the model are cast. Unset: no cast.
  std::optional<at::ScalarType> output_dtype = std::nullopt;

  // Sums gradients in rank order on devices too, so that bits don't depend on
  // the backend's algorithm.
  bool reproducible = false;

  // Replaces the reduce-scatter. Null: none.
  std::shared_ptr<ReductionHook> comm_hook = nullptr;

  // True: the first rank of each mesh broadcasts its parameters. False: each
  // rank keeps its shard of its own values.
  bool broadcast_parameters = true;

  // On devices: iterations whose status may be outstanding, 0 to 16.
  int max_unconfirmed_iterations = 1;
};

// Returns `options` for hybrid sharding: each host is a shard group, and the
// hosts hold replicas. A value of `options.num_shards` stays. Collective.
FullyShardOptions hybrid_shard(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options);

// Settings of one unit; may change between forwards and backwards. Equal on all
// ranks, except for the prefetch depths.
struct UnitSettings {
  // False: stays unsharded from forward to backward.
  bool reshards_after_forward = true;
  // As a number in FullyShardOptions::reshard_after_forward. Only values that
  // some unit of the mesh had at construction are valid. Unset: only shards
  // stay.
  std::optional<int> reshards_to = std::nullopt;
  // False: stays unsharded until its shards are written.
  bool reshards_after_backward = true;
  // True: several modules in different places use the unit, so it stays
  // unsharded from its first use to the end of a forward or backward. Constant.
  bool spans_segments = false;
  // False: its backward reads none of its parameters.
  bool gathers_in_backward = true;
  // Divisor of the summed gradients. Unset: the number of ranks of its mesh.
  std::optional<double> gradient_divisor = std::nullopt;
  // False: backwards accumulate its gradients on this rank.
  bool synchronizes = true;
  // False: sums stay within the shard group, and the next sum includes them.
  bool sums_over_replicas = true;
  // True: unsharded parameters are always in the same memory.
  bool keeps_storage = false;
  // All-gathers issued ahead while this unit is in use. Unset: prefetch_depth
  // of the options.
  std::optional<size_t> forward_prefetch_depth = std::nullopt;
  std::optional<size_t> backward_prefetch_depth = std::nullopt;

  bool keeps_slices() const {
    return reshards_after_forward && reshards_to && gathers_in_backward;
  }
};

// ---- Units.

// Ranks that hold a unit, if they are not all ranks of the model; used for
// experts.
//
// Each rank names the ranks that hold the same parameters as it does. The
// meshes of one unit have one size, and their parameters differ only in names
// and values:
//
//   4 ranks, expert 0 on {0, 2} and expert 1 on {1, 3}:
//   selection.mesh_of = [rank](const std::string&) {
//     return UnitMesh{.ranks = rank % 2 == 0 ? std::vector{0, 2}
//                                            : std::vector{1, 3}};
//   };
struct UnitMesh {
  // Ranks of the model's group, ascending.
  std::vector<int> ranks = {};

  // Size of the shard group; divides the number of `ranks`. The shard groups
  // are replicas of each other. Unset: all `ranks`.
  std::optional<int> num_shards = std::nullopt;

  int size() const { return static_cast<int>(ranks.size()); }
  int shard_group_size() const { return num_shards.value_or(size()); }
  // Position of `rank` in `ranks`; -1 if absent.
  int index_of(int rank) const;

  friend bool operator==(const UnitMesh&, const UnitMesh&) = default;
};

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
// Throws ValueError on all ranks if the module has no parameters, if an ignored
// parameter or a buffer shares memory with a sharded one, or as
// make_sharded_units(). A forward throws if a trainable parameter was
// registered after this call.
std::unique_ptr<ShardedModel> fully_shard(
    const torch::nn::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options = {}, const UnitSelection& selection = {});
std::unique_ptr<ShardedModel> fully_shard(
    const torch::jit::Module& module,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options = {}, const UnitSelection& selection = {});

// Shards only optimizer state (ZeRO-1): units stay unsharded until their shards
// are written, and a rank allocates all unsharded gradients at once. Call
// before the first forward.
void shard_optimizer_state(ShardedModel& model);

}  // namespace brigade

#endif  // BRIGADE_FSDP_FULLY_SHARD_H_
