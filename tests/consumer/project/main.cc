// Program that uses the installed library: one step of DDP and one of FSDP in a
// world of 1.
#include <torch/torch.h>

#include <iostream>

#include "brigade/brigade.h"

int main() {
  brigade::GroupScope scope(brigade::single_process_group());
  const at::Tensor x = torch::ones({4, 3});

  torch::nn::Linear net(3, 1);
  brigade::DistributedDataParallel model(net, scope.group());
  model(x).sum().backward();

  torch::nn::Linear inner(3, 1);
  const auto sharded = brigade::fully_shard(*inner, scope.group());
  sharded->forward([&] { return inner->forward(x); }).sum().backward();

  bool averaged = true;
  for (const at::Tensor& weight : {net->weight, inner->weight}) {
    averaged &= torch::equal(weight.grad(), torch::full({1, 3}, 4.0));
  }
  std::cout << (averaged ? "the gradients are as expected\n"
                         : "a gradient is not 4 everywhere\n");
  return averaged ? 0 : 1;
}
