#include "brigade/checkpoint/checkpoint.h"

#include <utility>

#include "absl/strings/match.h"
#include "brigade/checkpoint/optimizer_state.h"
#include "brigade/checkpoint/tensor_files.h"

namespace brigade {
namespace {

CheckpointLayout layout_of(const std::string& path) {
  return absl::EndsWith(path, ".safetensors") ? CheckpointLayout::kFile
                                              : CheckpointLayout::kFolder;
}

// Collective: an unsupported optimizer type is an error on all ranks.
OptimizerState state_on_all_ranks(const CheckpointModel& model,
                                  const torch::optim::Optimizer& optimizer) {
  OptimizerState state;
  on_all_ranks(model.group, [&] { state = state_of(optimizer); });
  return state;
}

CheckpointMetadata warn_and_return(LoadedCheckpoint loaded) {
  for (const std::string& warning : loaded.warnings) TORCH_WARN(warning);
  return std::move(loaded.metadata);
}

}  // namespace

void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const torch::optim::Optimizer& optimizer,
                     const CheckpointMetadata& metadata) {
  const OptimizerState state = state_on_all_ranks(model, optimizer);
  save_with_state(path, layout_of(path), model, &state, metadata);
}

void save_checkpoint(const std::string& path, const CheckpointModel& model,
                     const CheckpointMetadata& metadata) {
  save_with_state(path, layout_of(path), model, nullptr, metadata);
}

CheckpointMetadata load_checkpoint(const std::string& path,
                                   const CheckpointModel& model,
                                   torch::optim::Optimizer& optimizer) {
  OptimizerState state = state_on_all_ranks(model, optimizer);
  LoadedCheckpoint loaded = load_with_state(path, model, &state);
  set_state(optimizer, state);
  return warn_and_return(std::move(loaded));
}

CheckpointMetadata load_checkpoint(const std::string& path,
                                   const CheckpointModel& model) {
  return warn_and_return(load_with_state(path, model, nullptr));
}

}  // namespace brigade
