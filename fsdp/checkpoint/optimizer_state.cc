#include "brigade/fsdp/checkpoint/optimizer_state.h"

#include <ATen/ops/scalar_tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/fsdp/checkpoint/optimizer_checkpoint.h"
#include "brigade/fsdp/checkpoint/optimizer_type.h"

namespace brigade {
namespace {

namespace optim = torch::optim;

// `use(shard, options)` of each parameter.
template <typename Use>
void for_each_stepped(const optim::Optimizer& optimizer, const Use& use) {
  for (const optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& shard : group.params()) use(shard, group.options());
  }
}

absl::StatusOr<OptimizerForm> form_of(const optim::Optimizer& optimizer) {
  const OptimizerType* const type = type_of(optimizer);
  if (type == nullptr) {
    return absl::InvalidArgumentError(
        "expected an optimizer that keeps its state by parameter: SGD, Adam, "
        "AdamW, RMSprop or Adagrad, found another.\nSave and load what it "
        "keeps as ShardedTensors.");
  }
  OptimizerForm form = {.type = type->name,
                        .has_state_before_steps = type->has_state_before_steps,
                        .stepped = {}};
  const std::unique_ptr<optim::OptimizerParamState> state = type->make_state();
  for_each_stepped(optimizer, [&](const at::Tensor& shard,
                                  const optim::OptimizerOptions& options) {
    SteppedShard& stepped = form.stepped.emplace_back();
    stepped.shard = shard;
    for (const StateField& field : type->fields(*state, options)) {
      stepped.fields.push_back(
          {.name = field.name,
           .is_count = std::holds_alternative<int64_t*>(field.value)});
    }
  });
  return form;
}

OptimizerFields fields_of(const optim::Optimizer& optimizer) {
  OptimizerFields fields;
  const OptimizerType* const type = type_of(optimizer);
  if (type == nullptr) return fields;
  for_each_stepped(optimizer, [&](const at::Tensor& shard,
                                  const optim::OptimizerOptions& options) {
    void* const key = shard.unsafeGetTensorImpl();
    const auto state = optimizer.state().find(key);
    if (state == optimizer.state().end()) return;
    for (const StateField& field : type->fields(*state->second, options)) {
      const auto* const tensor = std::get_if<at::Tensor*>(&field.value);
      fields[key][field.name] =
          tensor != nullptr
              ? **tensor
              : at::scalar_tensor(*std::get<int64_t*>(field.value), at::kLong);
    }
  });
  return fields;
}

void set_fields(optim::Optimizer& optimizer, OptimizerFields fields) {
  const OptimizerType& type = *type_of(optimizer);
  for_each_stepped(optimizer, [&](const at::Tensor& shard,
                                  const optim::OptimizerOptions& options) {
    void* const key = shard.unsafeGetTensorImpl();
    const auto found = fields.find(key);
    if (found == fields.end()) {
      optimizer.state().erase(key);
      return;
    }
    std::unique_ptr<optim::OptimizerParamState> state = type.make_state();
    for (const StateField& field : type.fields(*state, options)) {
      at::Tensor& value = found->second.at(field.name);
      if (const auto* tensor = std::get_if<at::Tensor*>(&field.value)) {
        **tensor = std::move(value);
      } else {
        *std::get<int64_t*>(field.value) = value.item<int64_t>();
      }
    }
    optimizer.state()[key] = std::move(state);
  });
}

void save(const CheckpointedModel& model, CheckpointKind kind,
          const std::string& path, const optim::Optimizer& optimizer,
          const SafetensorsMetadata& metadata) {
  save_checkpoint(model, kind, path, form_of(optimizer), fields_of(optimizer),
                  metadata);
}

SafetensorsMetadata load(const CheckpointedModel& model, CheckpointKind kind,
                         const std::string& path, optim::Optimizer& optimizer) {
  LoadedState loaded = load_checkpoint(model, kind, path, form_of(optimizer));
  set_fields(optimizer, std::move(loaded.fields));
  return std::move(loaded.metadata);
}

}  // namespace

void save_whole(const CheckpointedModel& model,
                const optim::Optimizer& optimizer, const std::string& path,
                const SafetensorsMetadata& metadata) {
  save(model, CheckpointKind::kFile, path, optimizer, metadata);
}

SafetensorsMetadata load_whole(const CheckpointedModel& model,
                               optim::Optimizer& optimizer,
                               const std::string& path) {
  return load(model, CheckpointKind::kFile, path, optimizer);
}

void save_shards(const CheckpointedModel& model,
                 const optim::Optimizer& optimizer, const std::string& folder,
                 const SafetensorsMetadata& metadata) {
  save(model, CheckpointKind::kFolder, folder, optimizer, metadata);
}

SafetensorsMetadata load_shards(const CheckpointedModel& model,
                                optim::Optimizer& optimizer,
                                const std::string& folder) {
  return load(model, CheckpointKind::kFolder, folder, optimizer);
}

}  // namespace brigade
