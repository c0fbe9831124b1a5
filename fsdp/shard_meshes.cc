#include "brigade/fsdp/shard_meshes.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

absl::Status check_mesh(const MeshRequest& unit, int rank, int num_ranks) {
  const UnitMesh& mesh = *unit.mesh;
  const auto error = [&](const auto&... words) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: the mesh of ", describe_unit(unit.unit), ": ", words...));
  };
  const auto& ranks = mesh.ranks;
  const bool rises =
      std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
  if (ranks.empty() || !rises || ranks.front() < 0 ||
      ranks.back() >= num_ranks || mesh.index_of(rank) < 0) {
    return error(
        "expected ascending ranks of the model's process group (world "
        "size ",
        num_ranks, ") that include rank ", rank, ", found [",
        absl::StrJoin(ranks, ", "),
        "].\nList the ranks that hold the same parameters as this "
        "rank.");
  }
  if (mesh.shard_group_size() < 1 ||
      mesh.size() % mesh.shard_group_size() != 0) {
    return error("expected num_shards to divide the mesh's size, ", mesh.size(),
                 ", found ", mesh.shard_group_size(),
                 ".\nOmit num_shards to shard over the whole mesh.");
  }
  return absl::OkStatus();
}

// Without the unit's name if it has its own mesh: ranks of different meshes may
// hold different units.
std::string describe_mesh_of(const MeshRequest& unit) {
  if (!unit.mesh) return absl::StrCat("'", unit.unit, "': on the model's mesh");
  return absl::StrCat("a unit on a mesh of ", unit.mesh->size(),
                      " ranks in shard groups of ",
                      unit.mesh->shard_group_size());
}

// `hashes`: each rank's two hashes of this unit, of the mesh's ranks and of the
// parameter names. `stride`: distance between ranks.
absl::Status check_peers(const MeshRequest& unit, int rank,
                         std::span<const int64_t> hashes, size_t stride) {
  for (const int peer : unit.mesh->ranks) {
    const std::string found =
        absl::StrCat(" on ", describe(*unit.mesh), "; rank ", rank,
                     " and rank ", peer, " differ.\n");
    if (hashes[peer * stride] != hashes[rank * stride]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: the mesh of ", describe_unit(unit.unit),
          ": expected the same mesh", found,
          "Put each rank of the model into one mesh of the unit."));
    }
    if (hashes[peer * stride + 1] != hashes[rank * stride + 1]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: ", describe_unit(unit.unit),
          ": expected the same parameter names in the same order", found,
          "Call fully_shard() on the same modules in the same order on all "
          "ranks of a mesh."));
    }
  }
  return absl::OkStatus();
}

std::unique_ptr<ShardTransport> make_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::vector<int>& gather_sizes, bool in_order) {
  if (streams.device().is_cpu() &&
      (group->getSize() == 1 || has_peers(*group))) {
    return make_ordered_transport(group, num_shards, gather_sizes);
  }
  return make_device_transport(group, num_shards, streams, gather_sizes,
                               in_order);
}

// Gathers sharded tensors over a transport's shard group.
class TransportShardGroup final : public ShardGroup {
 public:
  TransportShardGroup(ShardTransport& transport, bool is_everywhere)
      : ShardGroup(is_everywhere), transport_(&transport) {}

  // Makes later calls throw.
  void close() { transport_ = nullptr; }

  at::Tensor all_gather(const at::Tensor& values) override {
    TORCH_CHECK(transport_ != nullptr,
                "fully_shard: expected the model of a sharded tensor to exist "
                "when an operator gathers the tensor; it was destroyed.\nKeep "
                "the model.");
    const at::NoGradGuard no_grad;
    const int64_t numel = values.numel();
    const int num_ranks = transport_->num_shards();
    if (num_ranks == 1) return values.reshape({1, numel});
    const StreamPoint values_written = StreamPoint::now(values.device());
    at::Tensor all;
    ShardTransport::FuturePtr gathered;
    {
      const auto on_gathers = transport_->streams().for_gathers();
      values_written.wait();
      all = at::empty({num_ranks * numel}, values.options());
      all.narrow(0, transport_->shard_rank() * numel, numel).copy_(values);
      gathered = transport_->all_gather(all, num_ranks);
    }
    gathered->waitAndThrow();
    record_use(all);
    return all.view({num_ranks, numel});
  }

 private:
  ShardTransport* transport_;  // null: closed
};

}  // namespace

int UnitMesh::index_of(int rank) const {
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

std::string describe(const UnitMesh& mesh) {
  return absl::StrCat(
      "ranks ", absl::StrJoin(mesh.ranks, ", "),
      mesh.shard_group_size() == mesh.size()
          ? ""
          : absl::StrCat(" in shard groups of ", mesh.shard_group_size()));
}

void number_meshes(const Group& group, std::span<MeshRequest> units) {
  const int rank = group->getRank();
  std::vector<std::string> described;
  std::vector<MeshRequest*> meshed;
  std::vector<int64_t> hashes;  // by mesh: of its ranks, of parameter names
  absl::Status status;
  for (MeshRequest& unit : units) {
    described.push_back(describe_mesh_of(unit));
    if (!unit.mesh) continue;
    status.Update(check_mesh(unit, rank, group->getSize()));
    meshed.push_back(&unit);
    hashes.push_back(static_cast<int64_t>(c10::get_hash(unit.mesh->ranks)));
    hashes.push_back(static_cast<int64_t>(unit.hash));
  }
  if (meshed.empty()) return;
  require_agreement(group, "fully_shard: unit", described, status);
  const size_t stride = hashes.size();
  if (has_peers(*group)) {
    hashes = all_gather_ints(group, hashes, "could not compare its meshes");
    for (size_t i = 0; i < meshed.size(); ++i) {
      status.Update(check_peers(*meshed[i], rank,
                                std::span(hashes).subspan(2 * i), stride));
    }
  }
  require_agreement(group, "fully_shard: unit", {}, status);

  // Key: the mesh of each rank, and the number of shards.
  std::map<std::pair<std::vector<int64_t>, int>, size_t> numbers;
  for (size_t i = 0; i < meshed.size(); ++i) {
    std::vector<int64_t> mesh_by_rank;
    for (size_t k = 2 * i; k < hashes.size(); k += stride) {
      mesh_by_rank.push_back(hashes[k]);
    }
    const int num_shards = meshed[i]->mesh->shard_group_size();
    meshed[i]->number = numbers
                            .try_emplace({std::move(mesh_by_rank), num_shards},
                                         numbers.size() + 1)
                            .first->second;
  }
}

ShardMeshes::ShardMeshes(const Group& group, int num_shards, c10::Device device,
                         std::span<const MeshRequest> units, bool in_order) {
  std::map<size_t, std::set<int>> gather_sizes;  // by mesh number
  std::map<size_t, UnitMesh> own_meshes;
  for (const MeshRequest& unit : units) {
    std::set<int>& sizes = gather_sizes[unit.number];
    if (unit.gather_size) sizes.insert(*unit.gather_size);
    if (unit.number > 0) own_meshes.emplace(unit.number, *unit.mesh);
  }
  const auto sizes_of = [&](size_t number) {
    const std::set<int>& sizes = gather_sizes[number];
    return std::vector<int>(sizes.begin(), sizes.end());
  };
  Mesh& root = meshes_.emplace_back(Mesh{.gather_sizes = sizes_of(0)});
  root.transport = make_transport(group, num_shards, ShardingStreams(device),
                                  root.gather_sizes, in_order);
  root.shard_group =
      std::make_shared<TransportShardGroup>(*root.transport, true);
  for (const auto& [number, mesh] : own_meshes) {
    Mesh made = {.gather_sizes = sizes_of(number)};
    made.scope.reset(new GroupScope(make_subgroup(group, mesh.ranks, device)));
    made.transport =
        make_transport(made.scope->group(), mesh.shard_group_size(), streams(),
                       made.gather_sizes, in_order);
    made.shard_group = std::make_shared<TransportShardGroup>(
        *made.transport, mesh.size() == group->getSize());
    meshes_.push_back(std::move(made));
  }
}

ShardMeshes::~ShardMeshes() {
  for (const Mesh& mesh : meshes_) {
    static_cast<TransportShardGroup&>(*mesh.shard_group).close();
  }
}

ShardTransport::Sent ShardMeshes::sent() const {
  ShardTransport::Sent sent;
  for (const Mesh& mesh : meshes_) {
    sent.by_gathers += mesh.transport->sent().by_gathers;
    sent.by_sums += mesh.transport->sent().by_sums;
  }
  return sent;
}

std::vector<Group> ShardMeshes::own_groups() const {
  std::vector<Group> groups;
  for (const Mesh& mesh : meshes_) {
    for (auto& own : mesh.transport->own_groups()) groups.push_back(own);
  }
  return groups;
}

}  // namespace brigade
