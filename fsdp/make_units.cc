#include "brigade/fsdp/make_units.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>

#include "brigade/fsdp/sharding_check.h"

namespace brigade {
namespace {

void broadcast_from_rank_0(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           const std::vector<UnitSpec>& units) {
  if (group->getSize() == 1) return;
  const at::NoGradGuard no_grad;
  for (const UnitSpec& unit : units) {
    for (const NamedParameter& parameter : unit.parameters) {
      if (parameter.tensor.numel() == 0) continue;
      const at::Tensor values = parameter.tensor.detach();
      std::vector<at::Tensor> sent = {values.contiguous()};
      group->broadcast(sent)->wait();
      if (!values.is_same(sent.front())) values.copy_(sent.front());
    }
  }
}

// With what the options say of each parameter.
std::vector<UnitSpec> completed(const std::vector<UnitSpec>& specs,
                                const ShardingOptions& options) {
  std::vector<UnitSpec> all = specs;
  for (UnitSpec& spec : all) {
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
  const std::vector<UnitSpec> specs = completed(given, options);
  require_alike(group, specs, options);
  if (options.broadcasts_parameters) broadcast_from_rank_0(group, specs);
  const int num_shards = options.num_shards.value_or(group->getSize());
  std::vector<Unit> units;
  units.reserve(specs.size());
  for (const UnitSpec& spec : specs) {
    Unit& unit = units.emplace_back();
    unit.name = spec.name;
    unit.settings.reshards_after_forward = spec.reshards_after_forward.value_or(
        options.reshards_after_forward &&
        (!spec.spans_passes || spec.reshards_to));
    unit.settings.reshards_to =
        spec.reshards_to ? spec.reshards_to : options.reshards_to;
    unit.settings.spans_passes = spec.spans_passes;
    unit.comm_hook = options.comm_hook;
    unit.shards.resize(spec.parameters.size());
    for (const std::vector<size_t>& members : segments_of(spec)) {
      std::vector<NamedParameter> parameters;
      for (const size_t i : members) parameters.push_back(spec.parameters[i]);
      const at::ScalarType dtype = parameters.front().tensor.scalar_type();
      const auto whole_dtype = parameters.front().whole_dtype
                                   ? parameters.front().whole_dtype
                                   : options.param_dtype;
      unit.segments.push_back(std::make_unique<Segment>(
          std::move(parameters),
          SegmentOptions{
              .unit = unit.name,
              .num_ranks = num_shards,
              .rank = group->getRank() % num_shards,
              .whole_dtype = dtype_or(whole_dtype, dtype),
              .reduce_dtype = dtype_or(options.reduce_dtype, dtype)}));
      for (size_t i = 0; i < members.size(); ++i) {
        unit.shards[members[i]] = unit.segments.back()->shards()[i];
      }
    }
  }
  return units;
}

}  // namespace brigade
