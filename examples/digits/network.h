// A small convolutional network for images of 8 x 8 pixels.  It has no batch
// normalisation, so that its gradients depend on nothing but the images and the
// weights.

#ifndef BRIGADE_EXAMPLES_DIGITS_NETWORK_H_
#define BRIGADE_EXAMPLES_DIGITS_NETWORK_H_

#include <torch/torch.h>

#include "brigade/examples/digits/dataset.h"

namespace brigade::digits {

class DigitsNetImpl : public torch::nn::Module {
 public:
  DigitsNetImpl() {
    register_module("conv1", conv1_);
    register_module("conv2", conv2_);
    register_module("hidden", hidden_);
    register_module("head", head_);
  }

  // x: float32, [n, 1, 8, 8].  Returns a score per digit, [n, 10].
  at::Tensor forward(at::Tensor x) {
    x = torch::relu(conv1_(x));                            // [n, 32, 8, 8]
    x = torch::relu(conv2_(x));                            // [n, 32, 8, 8]
    x = torch::max_pool2d(x, /*kernel_size=*/2);           // [n, 64, 4, 4]
    x = torch::relu(hidden_(x.flatten(/*start_dim=*/1)));  // [n, 64]
    return head_(x);
  }

 private:
  torch::nn::Conv2d conv1_{torch::nn::Conv2dOptions(1, 32, 3).padding(1)};
  torch::nn::Conv2d conv2_{torch::nn::Conv2dOptions(32, 64, 3).padding(1)};
  torch::nn::Linear hidden_{64 * 4 * 4, 64};
  torch::nn::Linear head_{64, kNumClasses};
};
TORCH_MODULE(DigitsNet);

}  // namespace brigade::digits

#endif  // BRIGADE_EXAMPLES_DIGITS_NETWORK_H_
