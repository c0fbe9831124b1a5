// Units of a sharded model: parameters that are unsharded and resharded
// together.

#ifndef BRIGADE_FSDP_SHARDED_UNIT_H_
#define BRIGADE_FSDP_SHARDED_UNIT_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/flat_shard.h"
#include "brigade/fsdp/shard_transport.h"
#include "brigade/fsdp/sharded_model.h"
#include "brigade/fsdp/unshard_buffers.h"

namespace brigade {

struct UnitRequest {
  std::string name;  // "blocks.2"; may be empty for the root
  std::vector<UnitParameter> parameters = {};  // each in one unit only
  // Index of the enclosing unit, which precedes this one. Unset: none.
  std::optional<size_t> parent = std::nullopt;
  // Unset: as in the options.
  std::optional<std::variant<bool, int>> reshard_after_forward = std::nullopt;
  // UnitSettings::spans_segments, for example for the norms of all blocks.
  bool spans_segments = false;
  // Unset: all ranks.
  std::optional<UnitMesh> mesh = std::nullopt;
};

struct ShardedUnit {
  using FuturePtr = ShardTransport::FuturePtr;

  // One all-gather of all flat parameters into a buffer.
  struct Gathered {
    Lease lease = {};
    std::vector<at::Tensor> wholes = {};  // by flat
    std::vector<FuturePtr> futures = {};  // by flat with an all-gather
  };

  std::string name;
  std::vector<std::unique_ptr<FlatShard>> flats = {};
  std::vector<at::Tensor> parameters = {};  // in order of the request
  UnitSettings settings = {};
  std::shared_ptr<ReductionHook> comm_hook = nullptr;
  std::optional<size_t> parent = std::nullopt;  // the enclosing unit
  std::optional<UnitMesh> mesh = std::nullopt;  // unset: all ranks
  uint64_t mesh_hash = 0;  // of the names, equal on the ranks of one mesh
  bool is_first_replica = true;
  size_t mesh_number = 0;
  ShardTransport* transport = nullptr;

  // ---- Unsharded.
  std::optional<Gathered> gathered = std::nullopt;
  bool is_bound = false;    // parameters are views into it
  bool is_stale = false;    // shards were written after the all-gather
  bool is_by_hand = false;  // by ShardedModel::unshard()
  bool may_write = false;   // while it is_by_hand
  std::optional<StreamUses> uses = std::nullopt;
  Lease kept = {};  // with settings.keeps_storage, while it is sharded

  // By flat, after a reshard to `settings.reshard_to` ranks; else empty.
  std::vector<at::Tensor> slices = {};
  Lease gradients = {};

  int64_t whole_bytes() const {
    int64_t bytes = 0;
    for (const auto& flat : flats) bytes += flat->whole_bytes();
    return bytes;
  }
  int64_t gradient_bytes() const {
    int64_t bytes = 0;
    for (const auto& flat : flats) {
      if (flat->is_trained()) bytes += flat->gradient_bytes();
    }
    return bytes;
  }
  bool is_trained() const {
    return std::ranges::any_of(
        flats, [](const auto& flat) { return flat->is_trained(); });
  }
  // Returns true if the next sum includes the replicas.
  bool sums_over_replicas() const {
    return settings.sums_over_replicas || transport->num_replicas() == 1;
  }
  double divisor() const {  // of its sums
    return settings.gradient_divisor.value_or(transport->num_shards() *
                                              transport->num_replicas());
  }
  // Returns true if gradients are divided before their reduction, where a sum
  // would otherwise be rounded to float16 before it is divided, and overflow.
  bool divides_first(const FlatShard& flat) const {
    const bool may_send_halves =
        comm_hook || flat.context().reduce_dtype == at::kHalf;
    return may_send_halves &&
           (!transport->scales() || transport->num_replicas() > 1);
  }
  // REQUIRES: gathered.
  void bind() {
    if (std::exchange(is_bound, true)) return;
    for (size_t i = 0; i < flats.size(); ++i) {
      flats[i]->bind(gathered->wholes[i]);
    }
  }
  void unbind() {
    if (!std::exchange(is_bound, false)) return;
    for (const auto& flat : flats) flat->unbind();
  }
};

// Map from memory ranges of tensors to names of their owners. Disjoint tensors
// in one storage, as in an LSTM flattened for cuDNN, may have different owners.
class ParameterMemory {
 public:
  // Gives the tensor's memory to `owner` and returns null; returns the present
  // owner instead if there is an overlap.
  const std::string* take(const at::Tensor& tensor, std::string owner);

  // Returns an owner of some of the tensor's memory, or null.
  const std::string* owner_of(const at::Tensor& tensor) const;

 private:
  struct Owned {
    const char* end = nullptr;
    std::string owner;
  };
  std::map<const char*, Owned> by_begin_;
};

// Compares requests and options across ranks, broadcasts the parameters and
// shards them in place. Collective. The units have no owner yet.
//
// Throws ValueError on all ranks, before any parameter changes, if requests or
// options differ or are invalid, or if a parameter is in two units, shares
// memory with another one, is sharded already, is not dense or not a leaf.
std::vector<ShardedUnit> make_sharded_units(
    std::vector<UnitRequest> requests,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const FullyShardOptions& options);

// Connects the meshes of the units and makes `owner` their owner. Collective.
// Throws ValueError on all ranks if meshes differ.
std::unique_ptr<ShardMeshes> connect_units(
    std::vector<ShardedUnit>& units,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const FullyShardOptions& options, ParameterOwner& owner);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_UNIT_H_
