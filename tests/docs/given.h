// Names that the C++ blocks of docs/ and the README use without a definition:
// a group, a module, data.

#ifndef BRIGADE_TESTS_DOCS_GIVEN_H_
#define BRIGADE_TESTS_DOCS_GIVEN_H_

#include <torch/torch.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unordered_map>
#include <utility>
#include <vector>

#include "brigade/bucket_sweep/sweep.h"
#include "brigade/checkpoint/checkpoint.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/fsdp/sharded_model.h"

struct Given {
  using Batch = std::pair<at::Tensor, at::Tensor>;

  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  explicit Given(Group group) : group(std::move(group)) {
    torch::manual_seed(1);
    net = torch::nn::Sequential(torch::nn::Linear(4, 8), torch::nn::ReLU(),
                                torch::nn::Linear(8, 2));
    torch::manual_seed(2 + this->group->getRank());
    for (int i = 0; i < 8; ++i) {
      const at::Tensor inputs = torch::randn({6, 4});
      batches.emplace_back(inputs, inputs.slice(1, 0, 2).square());
    }
  }

  const Group group;
  torch::nn::Sequential net;
  std::vector<Batch> batches;
};

// Local variables, so that blocks read as in a program.
#define BRIGADE_DOCS_NAMES(given)                           \
  [[maybe_unused]] const auto& group = (given).group;       \
  [[maybe_unused]] const auto store = group->getStore();    \
  [[maybe_unused]] const int rank = group->getRank();       \
  [[maybe_unused]] const int size = group->getSize();       \
  [[maybe_unused]] torch::nn::Sequential net = (given).net; \
  [[maybe_unused]] const auto& batches = (given).batches;   \
  [[maybe_unused]] torch::optim::SGD optimizer(net->parameters(), 0.1)

// Stands for GroupScope; another one owns the group.
struct GivenScope {
  Given::Group of;
  const Given::Group& group() const { return of; }
};

// Additional names of the README's blocks, after BRIGADE_DOCS_NAMES.
#define BRIGADE_README_NAMES                                             \
  [[maybe_unused]] const GivenScope scope = {group};                     \
  [[maybe_unused]] const std::vector<at::Tensor> parameters =            \
      torch::nn::Linear(3, 2)->parameters();                             \
  [[maybe_unused]] brigade::DistributedDataParallel model(net, group);   \
  [[maybe_unused]] const std::vector<Given::Batch> batches_of_this_rank( \
      batches.begin() + 2 * rank, batches.end());                        \
  [[maybe_unused]] const auto train_step =                               \
      [&optimizer](auto& trained, const at::Tensor& input,               \
                   const at::Tensor& target) {                           \
        optimizer.zero_grad();                                           \
        torch::mse_loss(trained(input), target).backward();              \
        optimizer.step();                                                \
      }

// Runs a page's blocks, checks that the parameters are equal on all ranks, and
// prints the page's name.
inline void run_page(const std::string& page, void (*blocks)(Given&),
                     const Given::Group& group) {
  Given given(group);
  blocks(given);
  for (const at::Tensor& parameter : given.net->parameters()) {
    std::vector<at::Tensor> first = {parameter.detach().clone()};
    given.group->broadcast(first)->wait();
    TORCH_CHECK(at::equal(first[0], parameter), "ranks differ after ", page);
  }
  std::cout << page << " has run\n" << std::flush;
}

#endif  // BRIGADE_TESTS_DOCS_GIVEN_H_
