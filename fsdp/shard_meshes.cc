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
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// ---- Numbers.

absl::Status check_mesh(const MeshRequest& unit, int rank, int num_ranks) {
  const UnitMesh& mesh = *unit.mesh;
  const auto refuse = [&](const auto&... words) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: the mesh of unit '", unit.unit, "': ", words...));
  };
  const auto& ranks = mesh.ranks;
  const bool rises =
      std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
  if (ranks.empty() || !rises || ranks.front() < 0 ||
      ranks.back() >= num_ranks || mesh.index_of(rank) < 0) {
    return refuse("expected ranks of the root, of which there are ", num_ranks,
                  ", in rising order, rank ", rank, " among them, found ",
                  absl::StrJoin(ranks, ", "),
                  ".\nName those that hold the same parameters as this rank.");
  }
  if (mesh.shard_group_size() < 1 ||
      mesh.size() % mesh.shard_group_size() != 0) {
    return refuse("expected num_shards to divide its number of ranks, ",
                  mesh.size(), ", found ", mesh.shard_group_size(),
                  ".\nLeave it out for all of them.");
  }
  return absl::OkStatus();
}

// Of a mesh of its own ranks may have other units.
std::string describe_mesh_of(const MeshRequest& unit) {
  if (!unit.mesh) return absl::StrCat("'", unit.unit, "' on the root's mesh");
  return absl::StrCat("one on groups of ", unit.mesh->size(),
                      " ranks, in rows of ", unit.mesh->shard_group_size());
}

// `of`: hashes of the ranks that each rank names, and of its names of
// parameters, `stride` apart.
absl::Status check_peers(const MeshRequest& unit, int rank,
                         std::span<const int64_t> of, size_t stride) {
  for (const int peer : unit.mesh->ranks) {
    for (const size_t kind : {0, 1}) {
      if (of[peer * stride + kind] == of[rank * stride + kind]) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: ", kind == 0 ? "the mesh of unit '" : "unit '",
          unit.unit,
          kind == 0 ? "': expected its ranks to name the same ranks"
                    : "': expected the same names, sharded in the same order",
          ", ", describe(*unit.mesh), " on rank ", rank,
          ", found others on rank ", peer,
          ".\nEach rank of the root is in one mesh of the unit; ranks of one "
          "mesh hold the same parameters."));
    }
  }
  return absl::OkStatus();
}

// ---- Collectives.

std::unique_ptr<ShardTransport> make_transport(
    const Group& group, int num_shards, const ShardingStreams& streams,
    const std::vector<int>& neighbours, bool in_order) {
  if (streams.device().is_cpu() &&
      (group->getSize() == 1 || has_peers(*group))) {
    return make_ordered_transport(group, num_shards, neighbours);
  }
  return make_device_transport(group, num_shards, streams, neighbours,
                               in_order);
}

// The ranks of a row, which hold all pieces of a tensor.
class RowGroup final : public ShardGroup {
 public:
  RowGroup(ShardTransport& transport, bool is_everywhere)
      : ShardGroup(is_everywhere), transport_(&transport) {}

  // The transport is gone from here on.
  void close() { transport_ = nullptr; }

  at::Tensor all_gather(const at::Tensor& values) override {
    TORCH_CHECK(transport_ != nullptr,
                "fully_shard: a sharded tensor is to be reduced or gathered, "
                "but its model is gone.\nKeep the model.");
    const at::NoGradGuard no_grad;
    const int64_t numel = values.numel();
    const int num_ranks = transport_->num_shards();
    if (num_ranks == 1) return values.reshape({1, numel});
    const StreamPoint made = StreamPoint::now(values.device());
    at::Tensor all;
    ShardTransport::FuturePtr gathered;
    {
      const auto on_gathers = transport_->streams().for_gathers();
      made.wait();
      all = at::empty({num_ranks * numel}, values.options());
      all.narrow(0, transport_->shard_rank() * numel, numel).copy_(values);
      gathered = transport_->all_gather(all, num_ranks);
    }
    gathered->waitAndThrow();
    record_use(all);
    return all.view({num_ranks, numel});
  }

 private:
  ShardTransport* transport_;
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
          : absl::StrCat(" in rows of ", mesh.shard_group_size()));
}

void number_meshes(const Group& group, std::span<MeshRequest> units) {
  const int rank = group->getRank();
  std::vector<std::string> described;
  std::vector<MeshRequest*> meshed;
  std::vector<int64_t> hashes;  // two of each: ranks, names
  absl::Status status;
  for (MeshRequest& unit : units) {
    described.push_back(describe_mesh_of(unit));
    if (!unit.mesh) continue;
    status.Update(check_mesh(unit, rank, group->getSize()));
    meshed.push_back(&unit);
    hashes.push_back(static_cast<int64_t>(c10::get_hash(unit.mesh->ranks)));
    hashes.push_back(static_cast<int64_t>(unit.hash));
  }
  if (meshed.empty()) return;  // on all ranks
  require_agreement(group, "sharded unit", described, status);
  const size_t stride = hashes.size();
  if (has_peers(*group)) {
    hashes = all_gather_ints(group, hashes, "could not compare its meshes");
    for (size_t i = 0; i < meshed.size(); ++i) {
      status.Update(check_peers(*meshed[i], rank,
                                std::span(hashes).subspan(2 * i), stride));
    }
  }
  require_agreement(group, "sharded unit", {}, status);

  std::map<std::pair<std::vector<int64_t>, int>, size_t> known;
  for (size_t i = 0; i < meshed.size(); ++i) {
    std::vector<int64_t> meshes;  // by rank
    for (size_t k = 2 * i; k < hashes.size(); k += stride) {
      meshes.push_back(hashes[k]);
    }
    const int row = meshed[i]->mesh->shard_group_size();
    meshed[i]->number =
        known.try_emplace({std::move(meshes), row}, known.size() + 1)
            .first->second;
  }
}

ShardMeshes::ShardMeshes(const Group& group, int num_shards, c10::Device device,
                         std::span<const MeshRequest> units, bool in_order) {
  std::map<size_t, std::set<int>> neighbours;
  std::map<size_t, UnitMesh> own;
  for (const MeshRequest& unit : units) {
    std::set<int>& of_mesh = neighbours[unit.number];
    if (unit.neighbours) of_mesh.insert(*unit.neighbours);
    if (unit.number > 0) own.emplace(unit.number, *unit.mesh);
  }
  const auto of = [&](size_t number) {
    const std::set<int>& numbers = neighbours[number];
    return std::vector<int>(numbers.begin(), numbers.end());
  };
  Mesh& root = meshes_.emplace_back(Mesh{.neighbours = of(0)});
  root.transport = make_transport(group, num_shards, ShardingStreams(device),
                                  root.neighbours, in_order);
  root.row = std::make_shared<RowGroup>(*root.transport, true);
  for (const auto& [number, mesh] : own) {
    Mesh made = {.neighbours = of(number)};
    made.scope.reset(new GroupScope(make_subgroup(group, mesh.ranks, device)));
    made.transport =
        make_transport(made.scope->group(), mesh.shard_group_size(), streams(),
                       made.neighbours, in_order);
    made.row = std::make_shared<RowGroup>(*made.transport,
                                          mesh.size() == group->getSize());
    meshes_.push_back(std::move(made));
  }
}

ShardMeshes::~ShardMeshes() {
  for (const Mesh& mesh : meshes_) static_cast<RowGroup&>(*mesh.row).close();
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
