// A user of the installed library: one step of training in a world of one.
#include <torch/torch.h>

#include <iostream>

#include "brigade/comm/process_group.h"
#include "brigade/ddp/distributed_data_parallel.h"

int main() {
  brigade::GroupScope scope(brigade::single_process_group());
  torch::nn::Linear net(3, 1);
  brigade::DistributedDataParallel model(net, scope.group());

  model(torch::ones({4, 3})).sum().backward();
  const bool averaged =
      torch::equal(net->weight.grad(), torch::full({1, 3}, 4.0));
  std::cout << (averaged ? "the gradient is as expected\n"
                         : "the gradient is not 4 everywhere\n");
  return averaged ? 0 : 1;
}
