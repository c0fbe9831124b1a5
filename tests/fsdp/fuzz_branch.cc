#include "brigade/tests/fsdp/fuzz_branch.h"

#include "brigade/tests/fsdp/sharded_net.h"

namespace brigade::testing {

at::Tensor input_of(const NetPlan& plan, const Branch& branch) {
  return testing::random({branch.rows, plan.width}, branch.seed)
      .requires_grad_(branch.takes_input_gradient);
}

at::Tensor loss_of_branch(const Branch& branch,
                          const std::vector<at::Tensor>& outputs) {
  at::Tensor loss;
  for (const size_t i : branch.in_loss) {
    const at::Tensor one = loss_of(outputs[i]);
    loss = loss.defined() ? loss + one : one;
  }
  return loss;
}

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
  }
  return copies;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& tensor : tensors) gradients.push_back(tensor.grad());
  return gradients;
}

}  // namespace brigade::testing
