#include "brigade/checkpoint/checkpoint.h"

#include <ATen/TensorGeometry.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace brigade {
namespace {

CheckpointLayout layout_of(const std::string& path) {
  return absl::EndsWith(path, ".safetensors") ? CheckpointLayout::kFile
                                              : CheckpointLayout::kFolder;
}

// state_of(); if it throws on one rank, all ranks throw.
OptimizerState state_on_all_ranks(const CheckpointModel& model,
                                  const torch::optim::Optimizer& optimizer) {
  OptimizerState state;
  on_all_ranks(model.group, [&] {
    state = state_of(optimizer);
    return std::string();
  });
  return state;
}

SafetensorsMetadata warn_and_return(LoadedCheckpoint loaded) {
  for (const std::string& warning : loaded.warnings) TORCH_WARN(warning);
  return std::move(loaded.metadata);
}

}  // namespace

CheckpointTensor unsharded_tensor(std::string name, const at::Tensor& tensor) {
  CheckpointTensor unsharded = {.name = std::move(name),
                                .shape = tensor.sizes().vec(),
                                .strides = tensor.strides().vec(),
                                .held = tensor};
  if (!tensor.is_non_overlapping_and_dense()) {
    const at::DimVector strides = c10::contiguous_strides(tensor.sizes());
    unsharded.strides = {strides.begin(), strides.end()};
  }
  return unsharded;
}

CheckpointModel::CheckpointModel(const torch::nn::Module& module,
                                 c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group(std::move(group)) {
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const bool is_tied =
        std::ranges::any_of(tensors, [&](const CheckpointTensor& known) {
          return known.held.is_same(tensor);
        });
    if (!is_tied) tensors.push_back(unsharded_tensor(name, tensor));
  };
  for (const auto& parameter : module.named_parameters()) {
    add(parameter.key(), parameter.value());
  }
  const size_t num_parameters = tensors.size();
  for (const auto& buffer : module.named_buffers()) {
    add(buffer.key(), buffer.value());
  }
  for (size_t i = num_parameters; i < tensors.size(); ++i) {
    tensors[i].is_optional = true;  // sharded models save none
  }
}

void save_checkpoint(const std::string& path, CheckpointLayout layout,
                     const CheckpointModel& model, const OptimizerState* state,
                     SafetensorsMetadata metadata) {
  if (state == nullptr) {
    return save_tensors(model.group, model.tensors, path, layout,
                        std::move(metadata));
  }
  metadata.merge(optimizer_metadata(model.group, model.tensors, *state));
  save_tensors(model.group, with_optimizer(model.tensors, *state), path, layout,
               std::move(metadata));
}

LoadedCheckpoint load_checkpoint(const std::string& path,
                                 const CheckpointModel& model,
                                 OptimizerState* state) {
  std::vector<std::string> differences;
  std::vector<std::string> missing;
  LoadedCheckpoint loaded;
  loaded.metadata =
      load_tensors(model.group, path, [&](const CheckpointContents& contents) {
        std::vector<CheckpointTensor> wanted;
        for (const CheckpointTensor& tensor : model.tensors) {
          if (!tensor.is_optional || contents.names.contains(tensor.name)) {
            wanted.push_back(tensor);
          } else {
            missing.push_back(tensor.name);
          }
        }
        if (state == nullptr) return wanted;
        differences = expect_saved(contents, wanted, *state);
        return with_optimizer(wanted, *state);
      });
  if (!missing.empty()) {
    loaded.warnings.push_back(
        absl::StrCat("load_checkpoint: '", path, "' has no buffers ",
                     absl::StrJoin(missing, ", "), ", which stay as they are"));
  }
  if (!differences.empty()) {
    loaded.warnings.push_back(absl::StrCat(
        "load_checkpoint: '", path, "' was saved with other options of ",
        state->type, ", which are used from here on: ",
        absl::StrJoin(differences, "; "), ".\nSet other ones after loading."));
  }
  return loaded;
}

void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const torch::optim::Optimizer& optimizer,
                     const SafetensorsMetadata& metadata) {
  const OptimizerState state = state_on_all_ranks(model, optimizer);
  save_checkpoint(path, layout_of(path), model, &state, metadata);
}

void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const SafetensorsMetadata& metadata) {
  save_checkpoint(path, layout_of(path), model, nullptr, metadata);
}

SafetensorsMetadata load_checkpoint(const std::string& path,
                                    const CheckpointModel& model,
                                    torch::optim::Optimizer& optimizer) {
  OptimizerState state = state_on_all_ranks(model, optimizer);
  LoadedCheckpoint loaded = load_checkpoint(path, model, &state);
  set_state(optimizer, state);
  return warn_and_return(std::move(loaded));
}

SafetensorsMetadata load_checkpoint(const std::string& path,
                                    const CheckpointModel& model) {
  return warn_and_return(
      load_checkpoint(path, model, static_cast<OptimizerState*>(nullptr)));
}

}  // namespace brigade
