#include "brigade/hooks/reentrant_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "brigade/hooks/kept_inputs.h"
#include "brigade/hooks/run_conditions.h"

namespace brigade {

using torch::autograd::variable_list;

class ReentrantCheckpoint::RunAgain final : public torch::autograd::Node {
 public:
  RunAgain(std::span<const at::Tensor> inputs, bool preserve_rng_state,
           Function function)
      : inputs_(inputs),
        conditions_(std::in_place, inputs, preserve_rng_state),
        function_(std::move(function)) {
    for (const at::Tensor& input : inputs) {
      add_next_edge(input.defined() && input.requires_grad()
                        ? torch::autograd::impl::gradient_edge(input)
                        : torch::autograd::Edge());
    }
  }

  // True if the next output is one of this node.
  bool add_output(const at::Tensor& output) {
    const bool is_differentiable =
        output.defined() &&
        torch::autograd::isDifferentiableType(output.scalar_type());
    is_differentiable_.push_back(is_differentiable);
    return is_differentiable;
  }

  std::string name() const override { return "brigade::ReentrantCheckpoint"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    inputs_.release();
    function_ = nullptr;
    conditions_.reset();
  }

 private:
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_backward();
    const std::vector<at::Tensor> inputs = inputs_.leaves();
    std::vector<at::Tensor> outputs;
    {
      const RunConditions::Guard as_before(*conditions_);
      outputs = function_(inputs);
    }
    TORCH_CHECK(outputs.size() == is_differentiable_.size(),
                "checkpoint: the function returned ", is_differentiable_.size(),
                " tensors when it ran first and ", outputs.size(),
                " when it ran again.\nLet it do the same in both runs.");

    variable_list roots;
    variable_list root_gradients;
    size_t next = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!is_differentiable_[i]) continue;
      at::Tensor& gradient = gradients[next++];
      if (!gradient.defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(std::move(gradient));
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);

    variable_list input_gradients;
    for (const at::Tensor& input : inputs) {
      input_gradients.push_back(input.defined() ? input.grad() : input);
    }
    return input_gradients;
  }

  void check_backward() const {
    TORCH_CHECK(function_,
                "checkpoint: expected the first backward through a reentrant "
                "checkpoint, found one after its inputs were freed.\nGive "
                "retain_graph=true to all backwards but the last.");
    TORCH_CHECK(
        torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
        "checkpoint: expected backward() over all leaves, found one with given "
        "inputs (autograd::grad), which a reentrant checkpoint can't keep "
        "apart from other parameters.\nUse CheckpointOptions{.reentrant = "
        "false}.");
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "checkpoint: expected create_graph=false, found true: the "
                "backward inside a reentrant checkpoint is not recorded.\nUse "
                "CheckpointOptions{.reentrant = false}.");
  }

  KeptInputs inputs_;
  std::optional<RunConditions> conditions_;  // until inputs are freed
  Function function_;
  std::vector<bool> is_differentiable_;  // by output
};

ReentrantCheckpoint::ReentrantCheckpoint(std::span<const at::Tensor> inputs,
                                         bool preserve_rng_state,
                                         Function function)
    : node_(make_node<RunAgain>(inputs, preserve_rng_state,
                                std::move(function))) {}

// Casts of weights made without grad mode must not be found by a later run.
ReentrantCheckpoint::FirstRun::FirstRun()
    : cast_cache_before_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
}

ReentrantCheckpoint::FirstRun::~FirstRun() {
  at::autocast::set_autocast_cache_enabled(cast_cache_before_);
}

void ReentrantCheckpoint::adopt(at::Tensor& output) {
  if (!static_cast<RunAgain&>(*node_).add_output(output)) return;
  output = output.detach();  // it may be an input, or captured
  torch::autograd::set_history(output, node_);
}

void refuse_outputs_of_reentrant_checkpoint() {
  TORCH_CHECK_VALUE(false,
                    "checkpoint: expected a tensor or a nest of vectors, "
                    "arrays, maps, pairs, tuples and optionals of tensors from "
                    "the function of a reentrant checkpoint, found another "
                    "type.\nReturn such a nest, or use "
                    "CheckpointOptions{.reentrant = false}.");
}

}  // namespace brigade
