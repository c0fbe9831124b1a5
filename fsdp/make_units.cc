#include "brigade/fsdp/make_units.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "brigade/comm/group/control_device.h"
#include "brigade/comm/subgroup.h"
#include "brigade/fsdp/sharding_check.h"
#include "brigade/fsdp/transport/mesh_ranks.h"

namespace brigade {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

using UnitsOfMesh = std::vector<const UnitSpec*>;

void broadcast_from_rank_0(const Group& group, const UnitsOfMesh& units) {
  if (group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  for (const UnitSpec* unit : units) {
    for (const NamedParameter& parameter : unit->parameters) {
      if (parameter.tensor.numel() == 0 || parameter.tensor.is_meta()) continue;
      const at::Tensor values = parameter.tensor.detach();
      std::vector<at::Tensor> sent = {values.contiguous()};
      group->broadcast(sent)->wait();
      if (!values.is_same(sent.front())) values.copy_(sent.front());
    }
  }
}

// Each mesh by a group that ends with this.
void broadcast_on_meshes(const Group& group, const std::vector<UnitSpec>& units,
                         const std::vector<size_t>& mesh_numbers) {
  std::map<size_t, UnitsOfMesh> by_mesh;
  for (size_t i = 0; i < units.size(); ++i) {
    by_mesh[mesh_numbers[i]].push_back(&units[i]);
  }
  for (const auto& [number, of_mesh] : by_mesh) {
    if (number == 0) {
      broadcast_from_rank_0(group, of_mesh);
      continue;
    }
    const UnitSpec& first = *of_mesh.front();
    const GroupScope scope = make_subgroup(
        group, first.mesh->ranks, first.parameters.front().tensor.device());
    broadcast_from_rank_0(scope.group(), of_mesh);
  }
}

// Of what ranks of one mesh have alike, and others need not.
uint64_t digest_of_names(const UnitSpec& unit) {
  size_t digest = std::hash<std::string>{}(unit.name);
  for (const NamedParameter& parameter : unit.parameters) {
    digest =
        c10::hash_combine(digest, std::hash<std::string>{}(parameter.name));
  }
  return digest;
}

// All 0 unless some have meshes, which is known to be alike on all ranks.
std::vector<size_t> number_meshes_of(const Group& group,
                                     const std::vector<UnitSpec>& units) {
  std::vector<NamedMesh> meshes;
  for (const UnitSpec& unit : units) {
    meshes.push_back({.unit = unit.name,
                      .mesh = unit.mesh,
                      .digest = digest_of_names(unit)});
  }
  const bool has_some = std::ranges::any_of(
      meshes, [](const NamedMesh& unit) { return unit.mesh.has_value(); });
  return has_some ? number_meshes(group, meshes)
                  : std::vector<size_t>(units.size(), 0);
}

// With what the options say of each parameter.
std::vector<UnitSpec> completed(const std::vector<UnitSpec>& specs,
                                const ShardingOptions& options) {
  std::vector<UnitSpec> all = specs;
  for (UnitSpec& spec : all) {
    if (!spec.mesh && options.mesh_of) spec.mesh = options.mesh_of(spec.name);
    for (NamedParameter& parameter : spec.parameters) {
      if (!parameter.tensor.defined()) continue;  // refused where all are
      if (options.block_numel_of) {
        parameter.block_numel =
            options.block_numel_of(parameter.name, parameter.tensor);
      }
      if (options.param_dtype_of) {
        parameter.whole_dtype =
            options.param_dtype_of(parameter.name, parameter.tensor);
      }
    }
  }
  return all;
}

// Parameters of one dtype, also while they are whole, that are all trained or
// all frozen.
std::vector<std::vector<size_t>> segments_of(const UnitSpec& unit) {
  std::vector<std::vector<size_t>> segments;
  const auto kind = [&](size_t i) {
    const at::Tensor& tensor = unit.parameters[i].tensor;
    return std::tuple(tensor.scalar_type(), tensor.requires_grad(),
                      unit.parameters[i].whole_dtype);
  };
  for (size_t i = 0; i < unit.parameters.size(); ++i) {
    const auto found =
        std::ranges::find_if(segments, [&](const std::vector<size_t>& segment) {
          return kind(segment.front()) == kind(i);
        });
    if (found == segments.end()) {
      segments.push_back({i});
    } else {
      found->push_back(i);
    }
  }
  return segments;
}

at::ScalarType dtype_or(std::optional<at::ScalarType> chosen,
                        at::ScalarType own) {
  return chosen && at::isFloatingType(own) ? *chosen : own;
}

}  // namespace

std::vector<Unit> make_units(
    const std::vector<UnitSpec>& given,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const ShardingOptions& options) {
  TORCH_CHECK_VALUE(group,
                    "fully_shard: the process group is null.\nGive that of "
                    "init_process_group().");
  const std::vector<UnitSpec> specs = completed(given, options);
  if (!specs.empty() && !specs.front().parameters.empty() &&
      specs.front().parameters.front().tensor.defined()) {
    suggest_control_device(group,
                           specs.front().parameters.front().tensor.device());
  }
  require_alike(group, specs, options);
  const std::vector<size_t> mesh_numbers = number_meshes_of(group, specs);
  if (options.broadcasts_parameters) {
    broadcast_on_meshes(group, specs, mesh_numbers);
  }
  const UnitMesh of_root = {.ranks = row_of(0, group->getSize()),
                            .num_shards = options.num_shards};
  std::vector<Unit> units;
  units.reserve(specs.size());
  for (const UnitSpec& spec : specs) {
    Unit& unit = units.emplace_back();
    unit.name = spec.name;
    unit.mesh = spec.mesh;
    unit.mesh_number = mesh_numbers[units.size() - 1];
    const UnitMesh& mesh = spec.mesh ? *spec.mesh : of_root;
    unit.settings.reshards_after_forward = spec.reshards_after_forward.value_or(
        options.reshards_after_forward &&
        (!spec.spans_passes || spec.reshards_to));
    unit.settings.reshards_after_backward = options.reshards_after_backward;
    unit.settings.reshards_to =
        spec.reshards_to || spec.mesh ? spec.reshards_to : options.reshards_to;
    unit.settings.spans_passes = spec.spans_passes;
    unit.settings.cast_forward_inputs = options.cast_forward_inputs;
    unit.comm_hook = options.comm_hook;
    unit.shards.resize(spec.parameters.size());
    for (const std::vector<size_t>& members : segments_of(spec)) {
      std::vector<NamedParameter> parameters;
      std::vector<at::Tensor> shards;
      for (const size_t i : members) {
        parameters.push_back(spec.parameters[i]);
        if (!spec.shards.empty()) shards.push_back(spec.shards[i]);
      }
      const at::ScalarType dtype = parameters.front().tensor.scalar_type();
      const auto whole_dtype = parameters.front().whole_dtype
                                   ? parameters.front().whole_dtype
                                   : options.param_dtype;
      unit.segments.push_back(std::make_unique<Segment>(
          std::move(parameters),
          SegmentOptions{
              .unit = unit.name,
              .num_ranks = mesh.row_length(),
              .rank = mesh.place_of(group->getRank()) % mesh.row_length(),
              .whole_dtype = dtype_or(whole_dtype, dtype),
              .reduce_dtype = dtype_or(options.reduce_dtype, dtype),
              .shards = std::move(shards)}));
      for (size_t i = 0; i < members.size(); ++i) {
        unit.shards[members[i]] = unit.segments.back()->shards()[i];
      }
    }
  }
  return units;
}

}  // namespace brigade
