// Makes units of parameters: from here on each rank holds its part of them.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_MAKE_UNITS_H_
#define BRIGADE_FSDP_MAKE_UNITS_H_

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/fsdp/sharding_options.h"
#include "brigade/fsdp/unit_spec.h"
#include "brigade/fsdp/units/unit.h"

namespace brigade {

// Collective: ranks compare units and options, and get the parameters of rank
// 0; of a unit with a mesh of its own, those of its first rank, and names are
// compared on it only. The parameters are whole only while they are needed from
// here on: reading them at other times is an error.
//
// Errors: ValueError on all ranks alike if units or options differ, a parameter
// is in two units, is no leaf, is not dense, is on meta (unless the options
// allow it) or elsewhere than on the CPU, or options or meshes
// (fsdp/units/unit_mesh.h) don't make sense; no parameter is changed then.
std::vector<Unit> make_units(
    const std::vector<UnitSpec>& specs,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const ShardingOptions& options);

}  // namespace brigade

#endif  // BRIGADE_FSDP_MAKE_UNITS_H_
