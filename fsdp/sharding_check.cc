#include "brigade/fsdp/sharding_check.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/agreement.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/fsdp/parameter_memory.h"
#include "brigade/fsdp/units/reduction_hook.h"

namespace brigade {
namespace {

std::string dtype_name(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "own";
}

std::string describe(const ShardingOptions& options) {
  return absl::StrCat(
      "sharding options: num_shards ",
      options.num_shards ? absl::StrCat(*options.num_shards) : "all",
      ", reshards_after_forward ", options.reshards_after_forward,
      ", reshards_to ",
      options.reshards_to ? absl::StrCat(*options.reshards_to) : "all",
      ", reshards_after_backward ", options.reshards_after_backward,
      ", trusts_versions ", options.trusts_versions, ", prefetch_depth ",
      options.prefetch_depth, ", max_reducing ", options.max_reducing,
      ", param_dtype ", dtype_name(options.param_dtype),
      ", cast_forward_inputs ", options.cast_forward_inputs, ", output_dtype ",
      dtype_name(options.output_dtype), ", reduce_dtype ",
      dtype_name(options.reduce_dtype), ", broadcasts_parameters ",
      options.broadcasts_parameters, ", reproducible ", options.reproducible,
      ", comm_hook ",
      options.comm_hook ? options.comm_hook->hook_name() : "none");
}

absl::Status check_reshards_to(std::optional<int> found, int num_shards) {
  if (!found ||
      (*found > 1 && *found < num_shards && num_shards % *found == 0)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "fully_shard: expected reshards_to to be more than 1, less than the "
      "number of shards, ",
      num_shards, ", and to divide it, found ", *found,
      ".\nGive the ranks of a host, or leave it out."));
}

absl::Status check_options(const ShardingOptions& options, int num_ranks) {
  if (options.num_shards &&
      (*options.num_shards < 1 || num_ranks % *options.num_shards != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "fully_shard: expected num_shards to divide the number of ranks, ",
        num_ranks, ", found ", *options.num_shards,
        ".\nGive the ranks of a host, or leave it out for all."));
  }
  const absl::Status reshards_to = check_reshards_to(
      options.reshards_to, options.num_shards.value_or(num_ranks));
  if (!reshards_to.ok()) return reshards_to;
  for (const auto& dtype :
       {options.param_dtype, options.reduce_dtype, options.output_dtype}) {
    if (dtype && !at::isFloatingType(*dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: expected a floating dtype to compute in, found ",
          c10::toString(*dtype), ".\nGive bfloat16, for instance."));
    }
  }
  return absl::OkStatus();
}

// `device`: of the first parameter.
absl::Status check_parameter(const UnitSpec& unit,
                             const NamedParameter& parameter,
                             c10::Device device, bool allows_meta) {
  const auto refuse = [&](const auto&... words) {
    return absl::InvalidArgumentError(
        absl::StrCat("fully_shard: parameter '", parameter.name, "' of unit '",
                     unit.name, "' ", words...));
  };
  const at::Tensor& tensor = parameter.tensor;
  if (!tensor.defined()) return refuse("is undefined.");
  if (tensor.is_meta() && !allows_meta) {
    return refuse(
        "is on meta: it has no values.\nGive it memory and values before it is "
        "sharded.");
  }
  if (tensor.device() != device) {
    return refuse("is on ", tensor.device().str(), ", the first one on ",
                  device.str(), ".\nMove the module to one device.");
  }
  if (tensor.layout() != at::kStrided) {
    return refuse("is not dense.\nUse a dense parameter.");
  }
  if (parameter.block_numel < 1) {
    return refuse("is not to be cut in blocks of ", parameter.block_numel,
                  " elements.\nGive 1, or the length of a row, for instance.");
  }
  if (parameter.whole_dtype && !at::isFloatingType(*parameter.whole_dtype)) {
    return refuse("can't be seen in ", c10::toString(*parameter.whole_dtype),
                  ".\nGive bfloat16, for instance.");
  }
  if (!tensor.is_leaf()) {
    return refuse(
        "was computed from others.\nShard the parameters of a "
        "module, which are leaves.");
  }
  return absl::OkStatus();
}

// As of a module that is moved later, in a group of NCCL alone.
absl::Status check_device(const c10d::ProcessGroup& group,
                          std::span<const UnitSpec> units) {
  for (const UnitSpec& unit : units) {
    for (const NamedParameter& parameter : unit.parameters) {
      const c10::Device device = parameter.tensor.device();
      if (device.is_meta() || supports_device(group, device.type())) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "fully_shard: parameter '", parameter.name, "' of unit '", unit.name,
          "' is on ", device.str(),
          ", for which the group has no backend.\n"
          "Move the module to the group's device before it is sharded."));
    }
  }
  return absl::OkStatus();
}

absl::Status check_units(std::span<const UnitSpec> units,
                         const ShardingOptions& options, int num_shards) {
  ParameterMemory memory;
  std::optional<c10::Device> device;
  for (const UnitSpec& unit : units) {
    if (unit.parameters.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("fully_shard: unit '", unit.name,
                       "' has no parameters.\nMake a unit of a module that "
                       "has some of its own."));
    }
    const absl::Status reshards_to = check_reshards_to(
        unit.reshards_to, unit.mesh ? unit.mesh->row_length() : num_shards);
    if (!reshards_to.ok()) return reshards_to;
    for (const NamedParameter& parameter : unit.parameters) {
      if (!device && parameter.tensor.defined()) {
        device = parameter.tensor.device();
      }
      auto status = check_parameter(unit, parameter, device.value_or(at::kCPU),
                                    options.allows_meta);
      if (!status.ok()) return status;
      const std::string* const owner = memory.take(
          parameter.tensor,
          absl::StrCat("'", parameter.name, "' of unit '", unit.name, "'"));
      if (owner == nullptr) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("fully_shard: parameter '", parameter.name,
                       "' of unit '", unit.name, "' shares its memory with ",
                       *owner, ".\nPut tied parameters into one unit, once."));
    }
  }
  return absl::OkStatus();
}

}  // namespace

void require_alike(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   std::span<const UnitSpec> units,
                   const ShardingOptions& options) {
  absl::Status status = check_options(options, group->getSize());
  if (status.ok()) {
    status = check_units(units, options,
                         options.num_shards.value_or(group->getSize()));
  }
  if (status.ok()) status = check_device(*group, units);
  std::vector<std::string> items = {describe(options)};
  for (const UnitSpec& unit : units) {
    for (const NamedParameter& parameter : unit.parameters) {
      const at::Tensor& tensor = parameter.tensor;
      // On other meshes it is another one.
      items.push_back(absl::StrCat(
          unit.mesh ? "unit with a mesh of its own"
                    : absl::StrCat("unit '", unit.name, "'"),
          unit.reshards_after_forward
              ? absl::StrCat(" (reshards ", *unit.reshards_after_forward, ")")
              : "",
          unit.reshards_to
              ? absl::StrCat(" (reshards to ", *unit.reshards_to, ")")
              : "",
          unit.spans_passes ? " (spans passes)" : "", ": ",
          unit.mesh ? "" : absl::StrCat("'", parameter.name, "' "),
          parameter.block_numel == 1
              ? ""
              : absl::StrCat("in blocks of ", parameter.block_numel, " "),
          parameter.whole_dtype
              ? absl::StrCat("seen in ", c10::toString(*parameter.whole_dtype),
                             " ")
              : "",
          tensor.defined()
              ? c10::str(tensor.device().type(), ' ', tensor.scalar_type(), ' ',
                         tensor.sizes(), ' ', tensor.strides(),
                         tensor.requires_grad() ? "" : ", frozen")
              : "undefined"));
    }
  }
  require_agreement(group, control_device(*group), "sharded parameter", items,
                    status);
}

}  // namespace brigade
