#ifndef BRIGADE_TESTS_SUPPORT_UNDEFINED_GRADIENT_H_
#define BRIGADE_TESTS_SUPPORT_UNDEFINED_GRADIENT_H_

#include <torch/torch.h>

namespace brigade::testing {

// The identity, whose backward returns an undefined gradient.
class Undefined : public torch::autograd::Function<Undefined> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*,
                            const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    return {at::Tensor()};
  }
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SUPPORT_UNDEFINED_GRADIENT_H_
