#include <torch/torch.h>

#include "brigade/comm/process_group.h"
#include "brigade/ddp/distributed_data_parallel.h"

int main() {
  brigade::GroupScope scope(brigade::init_process_group());
  torch::nn::Linear net(8, 1);
  brigade::DistributedDataParallel model(net, scope.group());
  torch::optim::SGD optimizer(net->parameters(), /*lr=*/0.1);
  torch::manual_seed(scope.group()->getRank());  // ranks draw different data
  for (int step = 0; step < 200; ++step) {
    const at::Tensor x = torch::randn({16, 8});
    optimizer.zero_grad();
    (model(x) - x.sum(1, true)).square().mean().backward();
    optimizer.step();
  }
  std::cout << "rank " << scope.group()->getRank() << " learned the weights "
            << net->weight << "\n";
}
