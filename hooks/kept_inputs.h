// The inputs of a checkpoint, kept for its second run.
//
// Kept as autograd keeps tensors, so that an enclosing checkpoint need not hold
// them in memory.
//
// Thread safety: const methods from any thread.

#ifndef BRIGADE_HOOKS_KEPT_INPUTS_H_
#define BRIGADE_HOOKS_KEPT_INPUTS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <span>
#include <vector>

namespace brigade {

class KeptInputs {
 public:
  explicit KeptInputs(std::span<const at::Tensor> inputs);

  // Leaves with the inputs' values, that require a gradient where those do.
  // Errors: RuntimeError if an input was changed in place; names its position.
  std::vector<at::Tensor> leaves() const;

  void release() { inputs_.clear(); }

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    uint32_t version = 0;
    bool requires_grad = false;
  };
  std::vector<Input> inputs_;
};

}  // namespace brigade

#endif  // BRIGADE_HOOKS_KEPT_INPUTS_H_
