#include "brigade/fsdp/units/mesh_transports.h"

#include <set>
#include <utility>

#include "brigade/comm/group/has_peers.h"
#include "brigade/comm/subgroup.h"
#include "brigade/fsdp/transport/device_transport.h"

namespace brigade {
namespace {

std::unique_ptr<ShardTransport> make_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const ShardingStreams& streams, const std::vector<int>& neighbours,
    bool in_order) {
  if (!streams.device().is_cpu()) {
    return make_device_transport(group, num_shards, streams, neighbours,
                                 in_order);
  }
  if (group->getSize() > 1 && !has_peers(*group)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        num_shards == group->getSize(), "fully_shard: expected all ",
        group->getSize(),
        " ranks of a group without peers to be one row, "
        "found rows of ",
        num_shards, ".\nShard over all of them there.");
    return make_group_transport(group, neighbours);
  }
  return make_ordered_transport(group, num_shards, neighbours);
}

// Of the units on one mesh, in rising order.
std::vector<int> neighbours_on(size_t mesh_number,
                               const std::vector<Unit>& units) {
  std::set<int> numbers;
  for (const Unit& unit : units) {
    if (unit.mesh_number != mesh_number) continue;
    if (unit.settings.reshards_to) numbers.insert(*unit.settings.reshards_to);
  }
  return {numbers.begin(), numbers.end()};
}

}  // namespace

MeshTransports::OfMesh::OfMesh(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, const UnitMesh& mesh,
    const ShardingStreams& streams, std::vector<int> numbers, bool in_order)
    : scope(make_subgroup(group, mesh.ranks, streams.device())),
      neighbours(std::move(numbers)),
      transport(make_transport(scope.group(), mesh.row_length(), streams,
                               neighbours, in_order)) {}

MeshTransports::MeshTransports(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    c10::Device device, const std::vector<Unit>& units, bool in_order)
    : neighbours_of_root_(neighbours_on(0, units)),
      root_(make_transport(group, num_shards, ShardingStreams(device),
                           neighbours_of_root_, in_order)) {
  for (const Unit& unit : units) {
    if (unit.mesh_number <= others_.size()) continue;
    others_.emplace_back(group, *unit.mesh, root_->streams(),
                         neighbours_on(unit.mesh_number, units), in_order);
  }
}

ShardTransport::Sent MeshTransports::sent() const {
  ShardTransport::Sent sent = root_->sent();
  for (const OfMesh& other : others_) {
    const ShardTransport::Sent of_mesh = other.transport->sent();
    sent.by_gathers += of_mesh.by_gathers;
    sent.by_sums += of_mesh.by_sums;
  }
  return sent;
}

std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> MeshTransports::own_groups()
    const {
  auto groups = root_->own_groups();
  for (const OfMesh& other : others_) {
    for (auto& own : other.transport->own_groups()) {
      groups.push_back(std::move(own));
    }
  }
  return groups;
}

}  // namespace brigade
