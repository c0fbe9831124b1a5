// Parameters that are gathered together, and released together.

#ifndef BRIGADE_FSDP_UNITS_UNIT_H_
#define BRIGADE_FSDP_UNITS_UNIT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "brigade/fsdp/schedule/unit_settings.h"
#include "brigade/fsdp/units/reduction_hook.h"
#include "brigade/fsdp/units/segment.h"
#include "brigade/fsdp/units/unit_mesh.h"

namespace brigade {

struct Unit {
  std::string name;  // "blocks.2"; of the outermost one it may be empty
  std::vector<std::unique_ptr<Segment>> segments;

  // By parameter, in the order in which they were given: the segments' shards.
  std::vector<at::Tensor> shards;

  UnitSettings settings;

  std::shared_ptr<ReductionHook> comm_hook = nullptr;  // none

  // What it is sharded over; none: what the root's options say. By its number
  // among the root's meshes, of number_meshes().
  std::optional<UnitMesh> mesh = std::nullopt;
  size_t mesh_number = 0;
};

// Counts changes of its shards in place.
inline int64_t version_of(const Unit& unit) {
  int64_t version = 0;
  for (const auto& segment : unit.segments) version += segment->version();
  return version;
}

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNITS_UNIT_H_
