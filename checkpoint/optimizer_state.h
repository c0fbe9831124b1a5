// Optimizer state in a checkpoint: options by parameter group, and tensors by
// parameter. LibTorch and Python optimizers share this form, so that each loads
// the other's checkpoints.
//
// The state of "weight" in AdamW is "weight.exp_avg", "weight.exp_avg_sq" and
// "weight.step", an I64 scalar. A parameter that was never stepped has no
// state.
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
    // Names of the state after a step: tensors with the parameter's shape, and
    // the scalar "step".
    std::vector<std::string> fields;
    std::map<std::string, at::Tensor> values;  // current state, by field
  };
  std::vector<Parameter> parameters;
};

// Throws ValueError unless the type is SGD, Adam, AdamW, RMSprop or Adagrad.
OptimizerState state_of(const torch::optim::Optimizer& optimizer);

// Sets options and tensors. REQUIRES: `state` comes from state_of() and
// load_with_state().
void set_state(torch::optim::Optimizer& optimizer, const OptimizerState& state);

// Implement save_checkpoint() and load_checkpoint() for optimizers of either
// library. `state` is nullptr without an optimizer; loading fills it.
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
