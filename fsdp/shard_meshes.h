// Transports of a model's units: one on the model's process group, and one for
// each distinct UnitMesh.
//
// All ranks launch the collectives of all meshes in one order. Each rank is in
// one group of every mesh, so that order cannot deadlock. On devices all meshes
// share two streams.
//
// Thread safety: as ShardTransport.

#ifndef BRIGADE_FSDP_SHARD_MESHES_H_
#define BRIGADE_FSDP_SHARD_MESHES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/fsdp/shard_transport.h"
#include "brigade/fsdp/sharded_model.h"
#include "brigade/fsdp/sharded_tensor.h"

namespace brigade {

// Returns "ranks 0, 2" or "ranks 0, 1, 2, 3 in shard groups of 2".
std::string describe(const UnitMesh& mesh);

// The mesh of one unit.
struct MeshRequest {
  std::string unit = {};
  std::optional<UnitMesh> mesh = std::nullopt;    // unset: the model's
  uint64_t hash = 0;                              // equal on ranks of one mesh
  std::optional<int> gather_size = std::nullopt;  // UnitSettings::reshard_to
  size_t number = 0;  // of the mesh, set by number_meshes()
};

// Numbers the units' meshes identically on all ranks: 0 is the model's; equal
// meshes share a number. Collective if some unit has its own mesh.
//
// Errors: the same ValueError on all ranks if a mesh is not a set of the
// model's ranks that includes this rank, if ranks of one mesh name different
// ranks or have different hashes, or if meshes of one unit differ in size.
void number_meshes(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   std::span<MeshRequest> units);

class ShardMeshes {
 public:
  struct Mesh {
    std::unique_ptr<GroupScope> scope = nullptr;  // null: the model's group
    std::unique_ptr<ShardTransport> transport = nullptr;
    std::vector<int> gather_sizes = {};  // for ShardTransport::all_gather()
    std::shared_ptr<ShardGroup> shard_group = nullptr;  // of sharded tensors
  };

  // Collective. `num_shards`: of the model's mesh. `in_order`: see
  // make_device_transport(). REQUIRES: number_meshes().
  ShardMeshes(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
              int num_shards, c10::Device device,
              std::span<const MeshRequest> units, bool in_order);

  // Sharded tensors that outlive it throw RuntimeError when gathered.
  ~ShardMeshes();
  ShardMeshes(const ShardMeshes&) = delete;
  ShardMeshes& operator=(const ShardMeshes&) = delete;

  const Mesh& of(size_t mesh_number) const { return meshes_[mesh_number]; }
  ShardTransport& root() const { return *meshes_.front().transport; }
  const ShardingStreams& streams() const { return root().streams(); }
  ShardTransport::Sent sent() const;
  // Groups that only the transports use.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> own_groups() const;

 private:
  std::vector<Mesh> meshes_;  // by number; the model's first
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_MESHES_H_
