// What is wrong with units and options, found on all ranks together.

#ifndef BRIGADE_FSDP_SHARDING_CHECK_H_
#define BRIGADE_FSDP_SHARDING_CHECK_H_

#include <span>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/fsdp/sharding_options.h"
#include "brigade/fsdp/unit_spec.h"

namespace brigade {

// Collective. Errors: ValueError on all ranks alike if one has bad units or
// options, or they differ.
void require_alike(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   std::span<const UnitSpec> units,
                   const ShardingOptions& options);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARDING_CHECK_H_
