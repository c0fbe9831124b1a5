// Makes units of parameters: from here on each rank holds its part of them.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_MAKE_UNITS_H_
#define BRIGADE_FSDP_MAKE_UNITS_H_

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/fsdp/sharding_options.h"
#include "brigade/fsdp/unit.h"

namespace brigade {

struct UnitSpec {
  std::string name;
  std::vector<NamedParameter> parameters = {};  // each in one unit only
  // Unset: the options', but false if it spans passes and has no reshards_to.
  std::optional<bool> reshards_after_forward = std::nullopt;
  // Unset: the options', or none if it has a mesh of its own.
  std::optional<int> reshards_to = std::nullopt;
  bool spans_passes = false;                    // see unit_settings.h
  std::optional<UnitMesh> mesh = std::nullopt;  // unset: the root's
  // By parameter, leaves that become this rank's shards: those of a unit that
  // was made of the same parameters in another dtype. None: new ones.
  std::vector<at::Tensor> shards = {};
};

// Collective: ranks compare units and options, and get the parameters of rank
// 0; of a unit with a mesh of its own, those of its first rank, and names are
// compared on it only. The parameters are whole only while they are needed from
// here on: reading them at other times is an error.
//
// Errors: ValueError on all ranks alike if units or options differ, a parameter
// is in two units, is no leaf, is not dense, is on meta (unless the options
// allow it) or elsewhere than on the CPU, or options or meshes
// (fsdp/unit_mesh.h) don't make sense; no parameter is changed then.
std::vector<Unit> make_units(
    const std::vector<UnitSpec>& specs,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const ShardingOptions& options);

}  // namespace brigade

#endif  // BRIGADE_FSDP_MAKE_UNITS_H_
