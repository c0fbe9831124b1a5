// ToyModel as a module. Its forward returns a loss whose gradients are known
// integers, and counts calls in a buffer.

#ifndef BRIGADE_TESTS_DDP_TOY_MODULE_H_
#define BRIGADE_TESTS_DDP_TOY_MODULE_H_

#include <torch/torch.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "brigade/tests/reducer/toy_model.h"

namespace brigade::testing {

using Order = std::vector<size_t>;

struct ToyModuleImpl : torch::nn::Module {
  explicit ToyModuleImpl(
      const ToyModel::Sizes& sizes = {{3, 2}, {5}, {2, 2, 2}, {7}})
      : toy(sizes) {
    for (size_t i = 0; i < toy.parameters.size(); ++i) {
      register_parameter(toy.names[i], toy.parameters[i]);
    }
    seen = register_buffer("seen", at::zeros({1}));
  }

  // `copy`: identifies the copy of the module, as the rank does.
  at::Tensor forward(const Order& uses, int copy, int step) {
    if (fails) throw std::domain_error("in forward");
    seen.add_(copy + 1);
    precision = toy.parameters[0].scalar_type();
    if (writes) {
      const at::NoGradGuard no_grad;
      toy.parameters[*writes].add_(1);
    }
    return toy.loss_in_order(uses, copy, step);
  }

  ToyModel toy;
  at::Tensor seen;
  std::optional<size_t> writes;           // parameter that forward writes
  at::ScalarType precision = at::kFloat;  // in the last forward
  bool fails = false;
};
TORCH_MODULE(ToyModule);

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_DDP_TOY_MODULE_H_
