// State of an optimizer: options by parameter group, and tensors by parameter.
// Neutral between LibTorch's optimizers and Python's, so that each loads the
// checkpoints of the other.
//
// SGD, Adam, AdamW, RMSprop and Adagrad are supported. The state of "weight" in
// AdamW is "weight.exp_avg", "weight.exp_avg_sq" and "weight.step", the last an
// I64 without dimensions. A parameter that was never stepped has no state.
//
// Thread safety: none.

#ifndef BRIGADE_CHECKPOINT_OPTIMIZER_STATE_H_
#define BRIGADE_CHECKPOINT_OPTIMIZER_STATE_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <map>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/checkpoint/tensor_files.h"

namespace brigade {

struct OptimizerState {
  std::string type;  // "AdamW"
  // The optimizer expects the tensors before a parameter's first step.
  bool needs_tensors = false;
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

// Throws ValueError for optimizers of other types.
OptimizerState state_of(const torch::optim::Optimizer& optimizer);

// Sets options and tensors. REQUIRES: made by state_of(), and loaded.
void set_state(torch::optim::Optimizer& optimizer, const OptimizerState& state);

// `tensors` and the optimizer's state of them. Throws ValueError for a
// parameter that is not in `tensors`.
std::vector<CheckpointTensor> with_optimizer(
    const std::vector<CheckpointTensor>& tensors, const OptimizerState& state);

// Collective: returns metadata with the optimizer's type and options. Throws
// ValueError on all ranks if those differ between ranks.
SafetensorsMetadata optimizer_metadata(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<CheckpointTensor>& tensors, const OptimizerState& state);

// Prepares `state` for loading: allocates its values for the saved state of
// each parameter and sets its options to the saved ones. Returns a text for
// each option that differed. Throws ValueError if the checkpoint has the state
// of another type, other tensors, or an option that this optimizer lacks.
std::vector<std::string> expect_saved(
    const CheckpointContents& contents,
    const std::vector<CheckpointTensor>& tensors, OptimizerState& state);

}  // namespace brigade

#endif  // BRIGADE_CHECKPOINT_OPTIMIZER_STATE_H_
