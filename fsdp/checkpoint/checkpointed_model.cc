#include "brigade/fsdp/checkpoint/checkpointed_model.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "brigade/comm/agreement.h"
#include "brigade/comm/group/control_device.h"
#include "brigade/comm/group/numbers_of_ranks.h"
#include "brigade/comm/group/shared_segment.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/fsdp/layout/digest.h"

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

CheckpointedModel::Reader CheckpointedModel::reader_of(uint64_t file_id) const {
  if (root_ != nullptr) root_->meet_peers();
  const auto host = static_cast<uint64_t>(SharedSegment::host());
  const auto rank = static_cast<size_t>(group_->getRank());
  const std::vector<int64_t> files = numbers_of_ranks(
      group_, static_cast<int64_t>(Digest().add(host).add(file_id).value()),
      "could not tell the others which file it reads");
  if (host == 0) return {};  // not known
  const auto own = files.begin() + static_cast<std::ptrdiff_t>(rank);
  return {
      .place = static_cast<size_t>(std::count(files.begin(), own, files[rank])),
      .num_readers = static_cast<size_t>(
          std::count(files.begin(), files.end(), files[rank]))};
}

void CheckpointedModel::require_agreement(const std::string& what,
                                          const std::vector<std::string>& items,
                                          const absl::Status& status) const {
  if (root_ != nullptr) root_->meet_peers();
  brigade::require_agreement(group_, control_device(*group_), what, items,
                             status);
}

}  // namespace brigade
