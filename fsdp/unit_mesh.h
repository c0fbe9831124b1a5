// The ranks that a unit is sharded over, where they are not the model's, or not
// in its rows: an expert's, of which other ranks have another one.
//
// Each rank names those that hold the same parameters as it does. So all ranks
// of the model fall into groups of one size, each with parameters of its own,
// which are alike in all but name and values:
//
//   4 ranks, expert 0 on {0, 2} and expert 1 on {1, 3}:
//   selection.mesh_of = [rank](const std::string&) {
//     return UnitMesh{.ranks = rank % 2 == 0 ? std::vector{0, 2}
//                                            : std::vector{1, 3}};
//   };
//
// Thread safety: values and pure functions, but for number_meshes().

#ifndef BRIGADE_FSDP_UNIT_MESH_H_
#define BRIGADE_FSDP_UNIT_MESH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

struct UnitMesh {
  // Of the model's group, in rising order.
  std::vector<int> ranks = {};

  // Cut over so many of them, which divides their number; the rows of so many
  // are replicas of each other. Unset: over all of them.
  std::optional<int> num_shards = std::nullopt;

  int size() const { return static_cast<int>(ranks.size()); }
  int row_length() const { return num_shards.value_or(size()); }
  // Of a rank of the model's group, among these; -1 for another one.
  int place_of(int rank) const;

  friend bool operator==(const UnitMesh&, const UnitMesh&) = default;
};

// "ranks 0, 2", "ranks 0, 1, 2, 3 in rows of 2".
std::string describe(const UnitMesh& mesh);

// Of one unit, as this rank has it.
struct NamedMesh {
  std::string unit;
  std::optional<UnitMesh> mesh = std::nullopt;  // unset: the model's
  uint64_t digest = 0;  // of what ranks of one mesh have alike
};

// Collective: compares what ranks say of units' meshes. By unit, which one it
// is on, numbered alike on all ranks: 0 is the model's, and units whose meshes
// are the same on all ranks have one number.
//
// Errors: ValueError on all ranks alike if a mesh is none of the model's ranks,
// this one among them, ranks of one mesh name others, or have another digest,
// or if meshes of one unit differ in their sizes.
std::vector<size_t> number_meshes(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::span<const NamedMesh> units);

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNIT_MESH_H_
