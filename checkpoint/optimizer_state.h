// State of an optimizer: options by parameter group, and tensors by parameter;
// saved and loaded with the model. Neutral between LibTorch's optimizers and
// Python's, so that each loads the checkpoints of the other.
//
// The state of "weight" in AdamW is "weight.exp_avg", "weight.exp_avg_sq" and
// "weight.step", the last an I64 without dimensions. A parameter that was never
// stepped has no state.
//
// Thread safety: none.

#ifndef BRIGADE_CHECKPOINT_OPTIMIZER_STATE_H_
#define BRIGADE_CHECKPOINT_OPTIMIZER_STATE_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "brigade/checkpoint/checkpoint_model.h"
#include "brigade/checkpoint/tensor_files.h"

namespace brigade {

struct OptimizerState {
  std::string type;                  // "AdamW"
  std::vector<std::string> options;  // by group: JSON, {"lr": 0.1, ...}

  struct Parameter {
    at::Tensor parameter;  // as the optimizer has it
    size_t group = 0;
    // State after a step: tensors of the parameter's sizes, and "step", a
    // count.
    std::vector<std::string> fields;
    std::map<std::string, at::Tensor> values;  // current state
  };
  std::vector<Parameter> parameters;
};

// Throws ValueError for optimizers of other types than SGD, Adam, AdamW,
// RMSprop and Adagrad.
OptimizerState state_of(const torch::optim::Optimizer& optimizer);

// Sets options and tensors. REQUIRES: made by state_of(), and loaded.
void set_state(torch::optim::Optimizer& optimizer, const OptimizerState& state);

// save_checkpoint() and load_checkpoint() of any library's optimizer. `state`:
// nullptr without one; loading fills it, for set_state().
void save_with_state(const std::string& path, CheckpointLayout layout,
                     const CheckpointModel& model, const OptimizerState* state,
                     CheckpointMetadata metadata);

struct LoadedCheckpoint {
  CheckpointMetadata metadata;
  std::vector<std::string> warnings;
};
LoadedCheckpoint load_with_state(const std::string& path,
                                 const CheckpointModel& model,
                                 OptimizerState* state);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_OPTIMIZER_STATE_H_
