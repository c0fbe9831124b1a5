// What a unit is to be made of.

#ifndef BRIGADE_FSDP_UNIT_SPEC_H_
#define BRIGADE_FSDP_UNIT_SPEC_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "brigade/fsdp/units/segment.h"
#include "brigade/fsdp/units/unit_mesh.h"

namespace brigade {

struct UnitSpec {
  std::string name;
  std::vector<NamedParameter> parameters = {};  // each in one unit only
  // Unset: the options', but false if it spans passes and has no reshards_to.
  std::optional<bool> reshards_after_forward = std::nullopt;
  // Unset: the options', or none if it has a mesh of its own.
  std::optional<int> reshards_to = std::nullopt;
  bool spans_passes = false;                    // see schedule/unit_settings.h
  std::optional<UnitMesh> mesh = std::nullopt;  // unset: the root's
  // By parameter, leaves that become this rank's shards: those of a unit that
  // was made of the same parameters in another dtype. None: new ones.
  std::vector<at::Tensor> shards = {};
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_UNIT_SPEC_H_
