#ifndef BRIGADE_FSDP_SHARDING_OPTIONS_H_
#define BRIGADE_FSDP_SHARDING_OPTIONS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/rank_mesh.h"
#include "brigade/fsdp/units/unit_mesh.h"

namespace brigade {

class ReductionHook;

// How parameters are sharded, and what that costs. Compared across ranks at
// construction, but for the patience.
struct ShardingOptions {
  // Over so many ranks, which divides their number; the groups of so many ranks
  // next to each other are replicas of each other: hybrid_shard() has those of
  // a host, a RankMesh others. 1: every rank holds all. Unset: all ranks.
  std::optional<int> num_shards = std::nullopt;

  // Units are released behind their forward and gathered again for backward: a
  // third more bytes, and memory for prefetch_depth + 1 units only. The
  // outermost unit stays whole. False: gradients and optimizer state are
  // sharded, parameters from backward's end to forward only.
  bool reshards_after_forward = true;

  // Units that are released so stay in slices on so many ranks next to each
  // other, those of a host for instance, and backward gathers among these. More
  // than 1, and divides the number of shards, which is more. Unset: shards are
  // all that stays. Not of units with meshes of their own, whose UnitSpecs say
  // theirs.
  std::optional<int> reshards_to = std::nullopt;

  // Units are released behind their backward. False: they stay whole until
  // their parameters are changed, or may have been (trusts_versions), so that
  // the next forward of several backwards gathers nothing.
  bool reshards_after_backward = true;

  // Shards are changed only by what counts it in their version, as Adam, AdamW,
  // RMSprop and Adagrad of LibTorch do and its SGD does not, or behind which
  // ShardedRoot::shards_changed() is called. False: a unit that stays whole is
  // gathered anew in each forward in front of which there may have been a step:
  // where its shards have gradients, or had some.
  bool trusts_versions = false;

  // Gathers that are under way before their unit is needed. 0: none, so that
  // nothing is computed meanwhile.
  size_t prefetch_depth = 1;

  // Reductions that keep the memory of a unit's whole gradients at once; the
  // next unit's gradients wait for the oldest. At least 1; alike on all ranks,
  // on devices.
  size_t max_reducing = 2;

  // What forward and backward compute in; shards, and so the optimizer, stay in
  // the parameters' dtype. Unset: the parameters' dtype.
  std::optional<at::ScalarType> param_dtype = std::nullopt;

  // Floating tensors that the model's forward and a unit's get are cast to
  // `param_dtype`. False: they are in it
  // already, or the modules cast. A unit may differ: UnitSettings.
  bool cast_forward_inputs = true;

  // What the floating tensors of the model's outputs are cast to, for instance
  // float32 for a loss. Unset: they stay as they are. Of a unit's outputs:
  // UnitSettings.
  std::optional<at::ScalarType> output_dtype = std::nullopt;

  // What gradients are summed in. Unset: the parameters' own dtype.
  std::optional<at::ScalarType> reduce_dtype = std::nullopt;

  // On devices, too, gradients are added up in the order of the ranks, as on
  // the CPU in any case, and not in the backend's: the bits do not depend on
  // what it chooses. In a row this sends the same bytes, between R replicas R /
  // 2 times as many; each sum that is under way takes memory for a unit's whole
  // gradients once more.
  bool reproducible = false;

  // What sums gradients in place of the transport's reduce-scatter, for
  // instance in float16: fsdp/units/reduction_hook.h. Null: none.
  std::shared_ptr<ReductionHook> comm_hook = nullptr;

  // Asked for each parameter when units are made, in place of what its
  // NamedParameter says: elements that are never cut
  // (fsdp/layout/shard_spec.h), such as a row, or the whole of a matrix; what
  // forward and backward see it in, none for `param_dtype`. Equal on all ranks.
  std::function<int64_t(const std::string& name, const at::Tensor&)>
      block_numel_of = {};
  std::function<std::optional<at::ScalarType>(const std::string& name,
                                              const at::Tensor&)>
      param_dtype_of = {};

  // Asked for each unit when units are made, unless its UnitSpec says it: the
  // ranks that hold its parameters, where they are not the root's; none for the
  // root's. Another answer on each rank (fsdp/units/unit_mesh.h).
  std::function<std::optional<UnitMesh>(const std::string& unit)> mesh_of = {};

  // All ranks begin with the parameters of rank 0. False: each keeps its part
  // of its own.
  bool broadcasts_parameters = true;

  // Parameters may be on meta, for whoever makes the units anew, of memory,
  // before there is a root.
  bool allows_meta = false;

  // A rank whose forward or backward fails waits so long for its peers to come
  // to where they hear it. Then it closes its connections, and raises.
  std::chrono::milliseconds failure_patience = std::chrono::seconds(30);
};

// ---- Strategies by name, beside the default, by which parameters, gradients
// and optimizer state are sharded (ZeRO-3): what else `options` say is kept.
//
//   shard_gradients({.prefetch_depth = 2});

// Gradients and optimizer state are sharded, parameters from backward's end to
// forward only (ZeRO-2): the bytes of data parallelism.
ShardingOptions shard_gradients(ShardingOptions options = {});

// Optimizer state is sharded, parameters are while it steps (ZeRO-1): a rank
// has memory for all parameters and all gradients, and no backward waits for
// it. Backwards that accumulate with ShardedRoot::set_synchronizes(false)
// communicate nothing.
ShardingOptions shard_optimizer_state(ShardingOptions options = {});

// All of them are sharded over the ranks of a host, and hosts hold replicas of
// each other (hybrid sharding): parameters are gathered inside of hosts, and
// sums of gradients go on between those. A number of shards that `options` give
// stays. Collective. Errors: as ranks_of_a_host() (comm/ranks_of_host.h).
ShardingOptions hybrid_shard(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    ShardingOptions options = {});

// Sharded over the rows of a mesh, which are replicas of each other: for its
// group. Errors: ValueError for another number of shards in `options`.
ShardingOptions shard_rows_of(const RankMesh& mesh,
                              ShardingOptions options = {});

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDING_OPTIONS_H_
