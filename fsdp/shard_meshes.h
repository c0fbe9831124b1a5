// The collectives of a model's units: on the model's group, and on meshes of
// units' own (UnitMesh).
//
// Ranks launch them in one order, whatever mesh they are on: each rank is in
// one group of every mesh, so none waits for a rank that waits for it. On
// devices all are launched on the same two streams.
//
// Thread safety: as ShardTransport's.

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

// "ranks 0, 2", "ranks 0, 1, 2, 3 in rows of 2".
std::string describe(const UnitMesh& mesh);

// The mesh of one unit.
struct MeshRequest {
  std::string unit = {};
  std::optional<UnitMesh> mesh = std::nullopt;   // unset: the model's
  uint64_t hash = 0;                             // equal on ranks of one mesh
  std::optional<int> neighbours = std::nullopt;  // that gather by themselves
  size_t number = 0;                             // of the mesh
};

// Collective unless no unit has a mesh of its own: compares the meshes across
// ranks and numbers them identically on all ranks. 0 is the model's mesh; units
// whose meshes are the same on all ranks have one number.
//
// Errors: ValueError on all ranks alike if a mesh is none of the model's ranks,
// this one among them, ranks of one mesh name others, or have another hash, or
// if meshes of one unit differ in their sizes.
void number_meshes(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   std::span<MeshRequest> units);

class ShardMeshes {
 public:
  struct Mesh {
    std::unique_ptr<GroupScope> scope = nullptr;  // null: the model's group
    std::unique_ptr<ShardTransport> transport = nullptr;
    std::vector<int> neighbours = {};  // numbers that gather by themselves
    std::shared_ptr<ShardGroup> row = nullptr;  // of operators on shards
  };

  // Collective. `num_shards`: of the model's mesh. `in_order`: sums on devices
  // are in the order of ranks. Throws as make_ordered_transport() and
  // make_subgroup(). REQUIRES: number_meshes().
  ShardMeshes(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
              int num_shards, c10::Device device,
              std::span<const MeshRequest> units, bool in_order);

  // Sharded tensors may live on: their rows throw RuntimeError from here on.
  ~ShardMeshes();
  ShardMeshes(const ShardMeshes&) = delete;
  ShardMeshes& operator=(const ShardMeshes&) = delete;

  const Mesh& of(size_t mesh_number) const { return meshes_[mesh_number]; }
  ShardTransport& root() const { return *meshes_.front().transport; }
  const ShardingStreams& streams() const { return root().streams(); }
  ShardTransport::Sent sent() const;
  // Groups that serve these collectives alone.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> own_groups() const;

 private:
  std::vector<Mesh> meshes_;  // by number; the model's first
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_MESHES_H_
