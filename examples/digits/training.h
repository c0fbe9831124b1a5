// What the distributed run and its reference have in common: how the weights
// follow from the gradients.

#ifndef BRIGADE_EXAMPLES_DIGITS_TRAINING_H_
#define BRIGADE_EXAMPLES_DIGITS_TRAINING_H_

#include <torch/torch.h>

#include <cstdint>

#include "brigade/examples/digits/network.h"

namespace brigade::digits {

struct TrainingOptions {
  int64_t epochs = 20;
  int64_t batch_size = 60;  // images per step, over all ranks
  uint32_t seed = 1;        // of the split, the order of images and the weights
  double learning_rate = 0.1;  // of the first step; falls to 0 in a line
};

inline torch::optim::SGD make_optimizer(const DigitsNet& net,
                                        const TrainingOptions& options) {
  return torch::optim::SGD(net->parameters(),
                           torch::optim::SGDOptions(options.learning_rate)
                               .momentum(0.9)
                               .weight_decay(1e-3));
}

// REQUIRES: 0 <= step < num_steps.
inline void set_learning_rate(torch::optim::SGD& optimizer,
                              const TrainingOptions& options, int64_t step,
                              int64_t num_steps) {
  const double left = 1.0 - static_cast<double>(step) / num_steps;
  for (torch::optim::OptimizerParamGroup& group : optimizer.param_groups()) {
    group.options().set_lr(options.learning_rate * left);
  }
}

}  // namespace brigade::digits

#endif  // BRIGADE_EXAMPLES_DIGITS_TRAINING_H_
