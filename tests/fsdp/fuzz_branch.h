// One rank's way through a network, on a rank or in the model of it.

#ifndef BRIGADE_TESTS_FSDP_FUZZ_BRANCH_H_
#define BRIGADE_TESTS_FSDP_FUZZ_BRANCH_H_

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <vector>

#include "brigade/tests/fsdp/fuzz_case.h"

namespace brigade::testing {

// A power of two: exact, so that fused arithmetic makes no difference.
constexpr double kRate = 0.125;

// Where a rank fails. `place`: a call of the branch; the head's behind them.
struct Fault {
  std::optional<size_t> forward = std::nullopt;
  std::optional<size_t> backward = std::nullopt;
};

struct ThrowInBackward : public torch::autograd::Function<ThrowInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            at::Tensor x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    throw std::runtime_error("bad gradient");
  }
};

at::Tensor input_of(const NetPlan& plan, const Branch& branch);

// Outputs as a Branch numbers them: the head's, and those that are in the loss.
// `call(unit, input, run)` runs a unit.
template <typename Call>
std::vector<at::Tensor> run_branch(const FuzzNet& net, const Branch& branch,
                                   const at::Tensor& x, const Fault& fault,
                                   const Call& call) {
  const auto run = [&](size_t unit, const at::Tensor& in, uint32_t uses,
                       size_t place) {
    if (fault.forward == place) throw std::runtime_error("bad input");
    return net.run(unit, in, uses);
  };
  const auto is_in_loss = [&](size_t output) {
    return std::find(branch.in_loss.begin(), branch.in_loss.end(), output) !=
           branch.in_loss.end();
  };
  return call(0, x, [&](const at::Tensor& in) {
    std::vector<at::Tensor> outputs(1);
    at::Tensor h = in;
    const size_t num_calls = branch.calls.size();
    for (size_t i = 0; i < num_calls; ++i) {
      const BlockCall& one = branch.calls[i];
      h = call(one.block + 1, h, [&](const at::Tensor& inner) {
        return run(one.block + 1, inner, one.uses, i);
      });
      if (fault.backward == i) h = ThrowInBackward::apply(h);
      outputs.push_back(is_in_loss(i + 1) ? h : at::Tensor());
    }
    outputs[0] = run(0, h, branch.uses_of_head, num_calls);
    if (fault.backward == num_calls) {
      outputs[0] = ThrowInBackward::apply(outputs[0]);
    }
    return outputs;
  });
}

at::Tensor loss_of_branch(const Branch& branch,
                          const std::vector<at::Tensor>& outputs);
std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& tensors);

struct Live {
  at::Tensor input;
  std::vector<at::Tensor> outputs = {};
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_FSDP_FUZZ_BRANCH_H_
