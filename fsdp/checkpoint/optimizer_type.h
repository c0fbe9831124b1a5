// What each of LibTorch's optimizers keeps for a parameter, by name.
//
// Thread safety: pure functions.

#ifndef BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_TYPE_H_
#define BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_TYPE_H_

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

namespace brigade {

// Refers to a value in a state.
struct StateField {
  std::string name;  // "exp_avg"
  std::variant<at::Tensor*, int64_t*>
      value;  // of the parameter's sizes; a count
};

struct OptimizerType {
  std::string name;  // "AdamW"
  bool (*is_type_of)(const torch::optim::Optimizer& optimizer);
  // Tensors in it are undefined.
  std::unique_ptr<torch::optim::OptimizerParamState> (*make_state)();
  // All that a state has under these options. REQUIRES: both are of the type.
  std::vector<StateField> (*fields)(
      torch::optim::OptimizerParamState& state,
      const torch::optim::OptimizerOptions& options);
  // Its constructor makes the states, and a step expects them.
  bool has_state_before_steps = false;
};

// Null: none that keeps its state by parameter.
const OptimizerType* type_of(const torch::optim::Optimizer& optimizer);

// Names of fields of all types, under any options.
const std::set<std::string>& all_state_fields();

}  // namespace brigade

#endif  // BRIGADE_FSDP_CHECKPOINT_OPTIMIZER_TYPE_H_
