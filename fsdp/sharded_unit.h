// Units: parameters that are gathered together, and released together.

#ifndef BRIGADE_FSDP_SHARDED_UNIT_H_
#define BRIGADE_FSDP_SHARDED_UNIT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/flat_shard.h"
#include "brigade/fsdp/shard_meshes.h"
#include "brigade/fsdp/sharded_model.h"
#include "brigade/fsdp/unshard_buffers.h"

namespace brigade {

// A unit to be made.
struct UnitRequest {
  std::string name;  // "blocks.2"; of the outermost unit perhaps empty
  std::vector<UnitParameter> parameters = {};  // each in one unit only
  // The unit around it, which comes before it. Unset: none.
  std::optional<size_t> parent = std::nullopt;
  // Unset: as the options say.
  std::optional<std::variant<bool, int>> reshard_after_forward = std::nullopt;
  // Its modules are used here and there, as the norms of all blocks are: it
  // stays unsharded from its first use to the segment's end.
  bool spans_segments = false;
  // Ranks that hold these parameters. Unset: all.
  std::optional<UnitMesh> mesh = std::nullopt;
};

struct ShardedUnit {
  using FuturePtr = ShardTransport::FuturePtr;

  // One all-gather of all flats into a buffer.
  struct Gathered {
    Lease lease = {};
    std::vector<at::Tensor> wholes = {};  // by flat
    std::vector<FuturePtr> futures = {};  // by flat that travels
  };

  std::string name;
  std::vector<std::unique_ptr<FlatShard>> flats = {};
  std::vector<at::Tensor> parameters = {};  // in the order of the request
  UnitSettings settings = {};
  std::shared_ptr<ReductionHook> comm_hook = nullptr;
  std::optional<size_t> parent = std::nullopt;  // the unit around it
  std::optional<UnitMesh> mesh = std::nullopt;  // unset: the model's
  uint64_t mesh_hash = 0;                       // equal on ranks of one mesh
  bool is_first_replica = true;
  size_t mesh_number = 0;
  ShardTransport* transport = nullptr;

  // ---- Unsharded.
  std::optional<Gathered> gathered = std::nullopt;
  bool is_bound = false;    // parameters read it
  bool is_stale = false;    // shards were written since it was gathered
  bool is_by_hand = false;  // until ShardedModel::reshard()
  std::optional<StreamUses> uses = std::nullopt;
  Lease kept = {};  // settings.keeps_storage: while it is sharded

  // Slices for all-gathers among neighbours; by flat, none: none.
  std::vector<at::Tensor> slices = {};
  Lease gradients = {};

  int64_t whole_bytes() const;
  int64_t gradient_bytes() const;
  bool is_trained() const;
  // Whether its next sums go over replicas, and their divisor.
  bool sums_over_replicas() const;
  double divisor() const;
  // Binds or unbinds all parameters. REQUIRES of bind(): gathered.
  void bind();
  void unbind();
};

// Owners of the bytes of tensors. Those of one storage may lie side by side, as
// an LSTM's do that cuDNN has flattened.
class ParameterMemory {
 public:
  // Null if nobody has any of the tensor's memory, which then belongs to
  // `owner`; otherwise who has it.
  const std::string* take(const at::Tensor& tensor, std::string owner);

  // Who has some of it, or null.
  const std::string* owner_of(const at::Tensor& tensor) const;

 private:
  struct Owned {
    const char* end = nullptr;
    std::string owner;
  };
  std::map<const char*, Owned> by_begin_;
};

// Collective: compares requests and options across ranks, broadcasts the
// parameters and shards them in place. The units belong to no model yet.
//
// Throws ValueError on all ranks alike if requests or options differ or make no
// sense, a parameter is in two units, shares memory with another one, is
// sharded already, not dense or no leaf. No parameter is changed then.
std::vector<ShardedUnit> make_sharded_units(
    std::vector<UnitRequest> requests,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const FullyShardOptions& options);

// Collective: connects the meshes of units, which belong to `owner` from here
// on. Throws ValueError on all ranks alike if meshes differ.
std::unique_ptr<ShardMeshes> connect_units(
    std::vector<ShardedUnit>& units,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const FullyShardOptions& options, ParameterOwner& owner);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDED_UNIT_H_
