// How parameters are sharded, and what that costs.

#ifndef BRIGADE_FSDP_FULLY_SHARD_OPTIONS_H_
#define BRIGADE_FSDP_FULLY_SHARD_OPTIONS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <variant>
#include <vector>

namespace brigade {

class ReductionHook;

// Compared across ranks by fully_shard().
struct FullyShardOptions {
  // Parameters are sharded over this many ranks, which divides the number of
  // ranks. The groups of so many consecutive ranks are replicas of each other.
  // 1: every rank holds all. Unset: all ranks.
  std::optional<int> num_shards = std::nullopt;

  // True: units are released after their forward and gathered again for their
  // backward (ZeRO-3). False: they stay unsharded in between (ZeRO-2: the bytes
  // of data parallelism). A number, more than 1, that divides the number of
  // shards: they stay in slices on this many consecutive ranks of a row, those
  // of a host for example, and are gathered from these for their backward.
  // ZeRO-1: shard_optimizer_state() (fsdp/fully_shard.h).
  std::variant<bool, int> reshard_after_forward = true;

  // All-gathers that are issued ahead of the unit in use.
  size_t prefetch_depth = 1;

  // Dtype of parameters in forward and backward. Unset: their own. Optimizers
  // always see their own.
  std::optional<at::ScalarType> param_dtype = std::nullopt;

  // Dtype in which gradients are summed. Unset: the parameters' own.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;

  // Dtype to which floating outputs of the model are cast. Unset: as they are.
  std::optional<at::ScalarType> output_dtype = std::nullopt;

  // On devices, too, gradients are added up in the order of ranks, so that bits
  // don't depend on the backend's choice.
  bool reproducible = false;

  // Replaces the reduce-scatter (fsdp/reduction_hook.h). Null: none.
  std::shared_ptr<ReductionHook> comm_hook = nullptr;

  // All ranks start with the parameters of the first rank of their mesh. False:
  // each keeps its piece of its own.
  bool broadcast_parameters = true;

  // Devices: iterations whose status may be outstanding, 0 to 16.
  int max_unconfirmed_iterations = 1;
};

// Of a unit; may be changed between forwards and backwards, alike on all ranks
// but for the prefetch.
struct UnitSettings {
  // False: it stays unsharded from forward to backward.
  bool reshards_after_forward = true;
  // After forward it stays in slices on so many neighbouring ranks, and is
  // gathered among these for backward. Divides the number of shards; named by
  // some unit of its mesh when the model is made. Unset: only its shards stay.
  std::optional<int> reshards_to = std::nullopt;
  // False: it stays unsharded until its shards are changed.
  bool reshards_after_backward = true;
  // Of a unit of several modules, which are used here and there: it stays
  // unsharded from its first use to the end of a forward or backward. Not to be
  // changed.
  bool spans_segments = false;
  // False: its backward reads none of its parameters.
  bool gathers_in_backward = true;
  // Of the sum of its gradients. Unset: the number of ranks of its mesh.
  std::optional<double> gradient_divisor = std::nullopt;
  // False: backwards accumulate its gradients on this rank.
  bool synchronizes = true;
  // False: of a mesh with replicas, sums over a row are added to the next ones.
  bool sums_over_replicas = true;
  // True: it has the same memory whenever it is unsharded.
  bool keeps_storage = false;
  // All-gathers ahead of those in use, once it is in use. Unset: as the options
  // say.
  std::optional<size_t> forward_prefetch_depth = std::nullopt;
  std::optional<size_t> backward_prefetch_depth = std::nullopt;

  bool keeps_slices() const {
    return reshards_after_forward && reshards_to && gathers_in_backward;
  }
};

// The ranks that a unit is sharded over, where they are not the model's, or not
// in its rows: those of an expert, of which other ranks have another one.
//
// Each rank names those that hold the same parameters as it does. So all ranks
// of the model fall into groups of one size, each with parameters of its own,
// which are alike in all but name and values:
//
//   4 ranks, expert 0 on {0, 2} and expert 1 on {1, 3}:
//   selection.mesh_of = [rank](const std::string&) {
//     return UnitMesh{.ranks = rank % 2 == 0 ? std::vector{0, 2}
//                                            : std::vector{1, 3}};
//   };
struct UnitMesh {
  // Of the model's group, in rising order.
  std::vector<int> ranks = {};

  // Cut over this many of them, which divides their number; the rows are
  // replicas of each other. Unset: over all of them.
  std::optional<int> num_shards = std::nullopt;

  int size() const { return static_cast<int>(ranks.size()); }
  int row_length() const { return num_shards.value_or(size()); }
  // Of a rank of the model's group, among these; -1 for another one.
  int place_of(int rank) const;

  friend bool operator==(const UnitMesh&, const UnitMesh&) = default;
};

// Of a unit.
struct UnitParameter {
  std::string name;  // "blocks.2.weight"
  at::Tensor tensor;
  int64_t block_numel = 1;  // so many elements are never cut
  // In forward and backward; unset: as the options say.
  std::optional<at::ScalarType> compute_dtype = std::nullopt;
};

// Hybrid sharding: shards over the ranks of a host; hosts hold replicas. A
// number of shards that `options` give stays. Collective.
FullyShardOptions hybrid_shard(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    FullyShardOptions options);

}  // namespace brigade

#endif  // BRIGADE_FSDP_FULLY_SHARD_OPTIONS_H_
