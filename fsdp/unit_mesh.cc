#include "brigade/fsdp/unit_mesh.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// What a rank says of a unit's mesh: its first rank, and the digest.
struct Said {
  int64_t first = 0;
  int64_t digest = 0;

  friend bool operator==(const Said&, const Said&) = default;
};

absl::Status check_mesh(const NamedMesh& unit, int rank, int num_ranks) {
  if (!unit.mesh) return absl::OkStatus();
  const UnitMesh& mesh = *unit.mesh;
  const auto refuse = [&](const auto&... words) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: the mesh of unit '", unit.unit, "': ", words...));
  };
  const auto& ranks = mesh.ranks;
  const bool rises =
      std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
  if (ranks.empty() || !rises || ranks.front() < 0 ||
      ranks.back() >= num_ranks || mesh.place_of(rank) < 0) {
    return refuse("expected ranks of the root, of which there are ", num_ranks,
                  ", in rising order, rank ", rank, " among them, found ",
                  absl::StrJoin(ranks, ", "),
                  ".\nName those that hold the same parameters as this rank.");
  }
  if (mesh.row_length() < 1 || mesh.size() % mesh.row_length() != 0) {
    return refuse("expected num_shards to divide its number of ranks, ",
                  mesh.size(), ", found ", mesh.row_length(),
                  ".\nLeave it out for all of them.");
  }
  return absl::OkStatus();
}

// Of a mesh of its own ranks may have other units.
std::string describe_mesh_of(const NamedMesh& unit) {
  if (!unit.mesh) return absl::StrCat("'", unit.unit, "' on the root's mesh");
  return absl::StrCat("one on groups of ", unit.mesh->size(),
                      " ranks, in rows of ", unit.mesh->row_length());
}

// By rank, by unit.
std::vector<std::vector<Said>> exchange_said(const Group& group,
                                             const std::vector<Said>& own) {
  const auto count = static_cast<int64_t>(own.size());
  const at::Tensor on_host = at::empty({count, 2}, at::kLong);
  auto mine = on_host.accessor<int64_t, 2>();
  for (int64_t unit = 0; unit < count; ++unit) {
    mine[unit][0] = own[unit].first;
    mine[unit][1] = own[unit].digest;
  }
  std::vector<at::Tensor> inputs = {on_host.to(control_device(*group))};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    outputs.front().push_back(at::empty_like(inputs.front()));
  }
  group->allgather(outputs, inputs)->wait();
  std::vector<std::vector<Said>> said;
  for (const at::Tensor& output : outputs.front()) {
    const at::Tensor of_peer = output.cpu();
    const auto theirs = of_peer.accessor<int64_t, 2>();
    std::vector<Said>& of_rank = said.emplace_back();
    for (int64_t unit = 0; unit < count; ++unit) {
      of_rank.push_back({theirs[unit][0], theirs[unit][1]});
    }
  }
  return said;
}

// Whether this rank's mesh has just the ranks that say the same as it does.
absl::Status check_peers(const NamedMesh& unit, size_t index, int rank,
                         const std::vector<std::vector<Said>>& said) {
  for (int peer = 0; peer < static_cast<int>(said.size()); ++peer) {
    const bool is_in = unit.mesh->place_of(peer) >= 0;
    const Said& theirs = said[peer][index];
    const Said& own = said[rank][index];
    if ((theirs.first == own.first) != is_in) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: the mesh of unit '", unit.unit,
          "': expected its ranks "
          "to name the same ones, found ",
          describe(*unit.mesh), " on rank ", rank, ", and others from rank ",
          theirs.first, " on, on rank ", peer,
          ".\nEach rank of the root is in one mesh of the unit."));
    }
    if (is_in && theirs.digest != own.digest) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: unit '", unit.unit,
          "': expected the same names, sharded in the same order, on ",
          describe(*unit.mesh), ", found others on ranks ", rank, " and ", peer,
          ".\nRanks of one mesh hold the same parameters; shard the same "
          "modules in the same order on all of them."));
    }
  }
  return absl::OkStatus();
}

}  // namespace

int UnitMesh::place_of(int rank) const {
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

std::string describe(const UnitMesh& mesh) {
  return absl::StrCat("ranks ", absl::StrJoin(mesh.ranks, ", "),
                      mesh.row_length() == mesh.size()
                          ? ""
                          : absl::StrCat(" in rows of ", mesh.row_length()));
}

std::vector<size_t> number_meshes(const Group& group,
                                  std::span<const NamedMesh> units) {
  const int rank = group->getRank();
  std::vector<std::string> described;
  std::vector<Said> own;
  std::vector<size_t> meshed;
  absl::Status status;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (status.ok()) status = check_mesh(units[unit], rank, group->getSize());
    described.push_back(describe_mesh_of(units[unit]));
    if (!units[unit].mesh) continue;
    meshed.push_back(unit);
    own.push_back({.first = units[unit].mesh->ranks.empty()
                                ? 0
                                : units[unit].mesh->ranks.front(),
                   .digest = static_cast<int64_t>(units[unit].digest)});
  }
  require_agreement(group, "sharded unit", described, status);
  std::vector<size_t> numbers(units.size(), 0);
  if (meshed.empty()) return numbers;

  // Identical ranks are all in one's mesh.
  const bool is_told = has_peers(*group);
  const std::vector<std::vector<Said>> said =
      is_told ? exchange_said(group, own)
              : std::vector<std::vector<Said>>(1, own);
  for (size_t i = 0; i < meshed.size() && is_told && status.ok(); ++i) {
    status = check_peers(units[meshed[i]], i, rank, said);
  }
  require_agreement(group, "sharded unit", {}, status);

  std::map<std::pair<std::vector<int64_t>, int>, size_t> known;
  for (size_t i = 0; i < meshed.size(); ++i) {
    std::vector<int64_t> firsts;  // by rank: which groups there are
    for (const auto& of_rank : said) firsts.push_back(of_rank[i].first);
    if (!is_told) {
      const auto& ranks = units[meshed[i]].mesh->ranks;
      firsts.assign(ranks.begin(), ranks.end());
    }
    numbers[meshed[i]] = known
                             .try_emplace({std::move(firsts),
                                           units[meshed[i]].mesh->row_length()},
                                          known.size() + 1)
                             .first->second;
  }
  return numbers;
}

}  // namespace brigade
