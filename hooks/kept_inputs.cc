#include "brigade/hooks/kept_inputs.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <optional>

namespace brigade {

KeptInputs::KeptInputs(std::span<const at::Tensor> inputs) {
  inputs_.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    inputs_.push_back(
        {.saved = torch::autograd::SavedVariable(input, /*is_output=*/false),
         .version =
             input.defined() ? static_cast<uint32_t>(input._version()) : 0,
         .requires_grad = input.defined() && input.requires_grad()});
  }
}

std::vector<at::Tensor> KeptInputs::leaves() const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> leaves;
  leaves.reserve(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const Input& input = inputs_[i];
    const std::optional<at::Tensor> kept = input.saved.get_raw_data();
    if (kept && kept->defined()) {
      TORCH_CHECK(kept->_version() == input.version, "checkpoint: input ", i,
                  ", ", kept->toString(), " ", kept->sizes(),
                  ", was changed in place before backward: expected version ",
                  input.version, ", found ", kept->_version(),
                  ".\nChange a clone of it, or change it after backward.");
    }
    at::Tensor leaf = input.saved.unpack();
    if (leaf.defined()) {
      leaf = leaf.detach();
      leaf.set_requires_grad(input.requires_grad);
    }
    leaves.push_back(std::move(leaf));
  }
  return leaves;
}

}  // namespace brigade
