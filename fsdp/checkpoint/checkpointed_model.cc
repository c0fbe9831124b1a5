#include "brigade/fsdp/checkpoint/checkpointed_model.h"

#include <algorithm>
#include <utility>

#include "brigade/comm/agreement.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/fsdp/fully_shard.h"

namespace brigade {
namespace {

std::vector<NamedParameter> distinct_parameters_of(
    const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& parameter : module.named_parameters()) {
    const bool is_tied =
        std::ranges::any_of(parameters, [&](const NamedParameter& known) {
          return known.tensor.is_same(parameter.value());
        });
    if (is_tied) continue;
    parameters.push_back({.name = without_unit_levels(parameter.key()),
                          .tensor = parameter.value()});
  }
  return parameters;
}

// As a unit lays it out (fsdp/units/segment.h).
std::vector<int64_t> strides_of(const at::Tensor& whole) {
  if (whole.is_non_overlapping_and_dense()) return whole.strides().vec();
  const at::DimVector strides = c10::contiguous_strides(whole.sizes());
  return {strides.begin(), strides.end()};
}

}  // namespace

CheckpointedModel::CheckpointedModel(ShardedRoot& root)
    : root_(&root), group_(root.group()) {
  for (size_t unit = 0; unit < root.num_units(); ++unit) {
    for (const auto& segment : root.unit(unit).segments) {
      for (size_t i = 0; i < segment->parameters().size(); ++i) {
        const NamedParameter& named = segment->parameters()[i];
        parameters_.push_back(
            {.name = named.name,
             .shape = named.tensor.sizes().vec(),
             .strides = named.tensor.strides().vec(),
             .held = segment->shards()[i],
             .begin = segment->layout().range(i, segment->rank()).in_parameter,
             .segment = segment.get(),
             .in_segment = i,
             .unit = unit,
             .is_on_own_mesh = root.unit(unit).mesh.has_value()});
      }
    }
  }
}

CheckpointedModel::CheckpointedModel(
    const torch::nn::Module& module,
    c10::intrusive_ptr<c10d::ProcessGroup> group)
    : CheckpointedModel(distinct_parameters_of(module), std::move(group)) {}

CheckpointedModel::CheckpointedModel(
    const std::vector<NamedParameter>& parameters,
    c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {
  for (const NamedParameter& parameter : parameters) {
    parameters_.push_back({.name = parameter.name,
                           .shape = parameter.tensor.sizes().vec(),
                           .strides = strides_of(parameter.tensor),
                           .held = parameter.tensor});
  }
}

void CheckpointedModel::require_agreement(const std::string& what,
                                          const std::vector<std::string>& items,
                                          const absl::Status& status) const {
  if (root_ != nullptr) root_->meet_peers();
  brigade::require_agreement(group_, control_device(*group_), what, items,
                             status);
}

}  // namespace brigade
