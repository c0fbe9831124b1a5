// The collectives of a root and of the units that have meshes of their own.
//
// Ranks launch them in one order, whatever mesh they are on: each rank is in
// one group of every mesh, so none waits for a rank that waits for it. On
// devices all are launched on the same two streams.
//
// Thread safety: as ShardTransport's.

#ifndef BRIGADE_FSDP_UNITS_MESH_TRANSPORTS_H_
#define BRIGADE_FSDP_UNITS_MESH_TRANSPORTS_H_

#include <c10/core/Device.h>

#include <deque>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/fsdp/transport/shard_transport.h"
#include "brigade/fsdp/units/unit.h"

namespace brigade {

class MeshTransports {
 public:
  // Collective: ranks connect. `num_shards`: of the root. `units`: whose meshes
  // are numbered. Errors: as make_ordered_transport()'s, make_subgroup()'s.
  // `in_order`: make_device_transport()'s.
  MeshTransports(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 int num_shards, c10::Device device,
                 const std::vector<Unit>& units, bool in_order = false);

  ShardTransport& root() const { return *root_; }
  ShardTransport& of(const Unit& unit) const {
    return unit.mesh_number == 0 ? *root_
                                 : *others_[unit.mesh_number - 1].transport;
  }

  // Numbers of ranks next to each other in a row of the unit's mesh that can
  // gather among themselves: what its units reshard to when this is made.
  const std::vector<int>& neighbours_of(const Unit& unit) const {
    return unit.mesh_number == 0 ? neighbours_of_root_
                                 : others_[unit.mesh_number - 1].neighbours;
  }

  // ShardTransport's, of all of them.
  ShardTransport::Sent sent() const;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> own_groups() const;

 private:
  struct OfMesh {
    OfMesh(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           const UnitMesh& mesh, const ShardingStreams& streams,
           std::vector<int> numbers, bool in_order);

    const GroupScope scope;  // ends behind what works on it
    const std::vector<int> neighbours;
    const std::unique_ptr<ShardTransport> transport;
  };

  const std::vector<int> neighbours_of_root_;
  const std::unique_ptr<ShardTransport> root_;
  std::deque<OfMesh> others_;  // by number
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_MESH_TRANSPORTS_H_
