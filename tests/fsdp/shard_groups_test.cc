// Shard groups of any ranks: training has the bits of one process that sums
// each shard group in order, and then the sums in order.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstddef>
#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace shard_groups_test {

using ::testing::HasSubstr;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using RankLists = std::vector<std::vector<int>>;
using Tensors = std::vector<at::Tensor>;

constexpr int kNumRanks = 4;
constexpr int kNumSteps = 3;
const std::vector<RankLists> kShardGroups = {{{0, 1}, {2, 3}},
                                             {{0, 2}, {1, 3}},
                                             {{3, 0}, {1, 2}},
                                             {{2, 0, 3, 1}},
                                             {{1}, {3}, {0}, {2}}};

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

// Adds each term to the sum of the same index; the first terms become the sums.
void add(Tensors& sums, const Tensors& terms) {
  for (size_t i = 0; i < terms.size(); ++i) {
    if (sums.size() == i) {
      sums.push_back(terms[i].clone());
    } else {
      sums[i].add_(terms[i]);
    }
  }
}

torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::Tanh(),
                            torch::nn::Linear(7, 3));
  const torch::NoGradGuard no_grad;
  uint64_t seed = 0;
  for (const at::Tensor& parameter : net->parameters()) {
    parameter.copy_(random(parameter.sizes(), ++seed));
  }
  return net;
}

at::Tensor input_of(int rank, int step) {
  return random({2, 5}, 100 + 10 * step + rank);
}

// Returns the parameters after training.
Tensors in_one_process(const RankLists& shard_groups) {
  torch::nn::Sequential net = make_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < kNumSteps; ++step) {
    Tensors sums;
    for (const auto& ranks : shard_groups) {
      Tensors group_sums;
      for (const int rank : ranks) {
        optimizer.zero_grad();
        net->forward(input_of(rank, step)).square().sum().backward();
        Tensors gradients;
        for (const at::Tensor& parameter : net->parameters()) {
          gradients.push_back(parameter.grad());
        }
        add(group_sums, gradients);
      }
      add(sums, group_sums);
    }
    for (size_t i = 0; at::Tensor & parameter : net->parameters()) {
      parameter.mutable_grad() = sums[i++].mul(1.0 / kNumRanks);
    }
    optimizer.step();
  }
  return net->parameters();
}

void expect_equal(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
  }
}

std::vector<int> flatten(const RankLists& shard_groups) {
  std::vector<int> ranks;
  for (const auto& group : shard_groups) {
    ranks.insert(ranks.end(), group.begin(), group.end());
  }
  return ranks;
}

TEST(ShardGroupsTest, TrainingSumsInRankOrder) {
  for (const RankLists& shard_groups : kShardGroups) {
    const Tensors expected = in_one_process(shard_groups);
    run_ranks(kNumRanks, [&](const Group& group) {
      const GroupScope scope = make_subgroup(group, flatten(shard_groups));
      torch::nn::Sequential net = make_net();
      const auto model = fully_shard(
          *net, scope.group(),
          {.num_shards = static_cast<int>(shard_groups.front().size())});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < kNumSteps; ++step) {
        const at::Tensor x = input_of(group->getRank(), step);
        optimizer.zero_grad();
        model->forward([&] { return net->forward(x); })
            .square()
            .sum()
            .backward();
        optimizer.step();
      }
      const auto unsharded = model->unsharded();
      expect_equal(net->parameters(), expected);
    });
  }
}

TEST(ShardGroupsTest, ErrorsNumberRanksAsTheSubgroup) {
  run_ranks(kNumRanks, [&](const Group& group) {
    const GroupScope scope = make_subgroup(group, {3, 0, 1, 2});
    torch::nn::Sequential net = make_net();
    const auto model = fully_shard(*net, scope.group(), {.num_shards = 2});
    const auto run = [&](const at::Tensor& x) {
      return model->forward([&] { return net->forward(x); });
    };
    if (group->getRank() == 3) {
      EXPECT_ANY_THROW(run(torch::ones({2, 4})));  // expects 5 columns
      return;
    }
    std::string message;
    try {
      run(torch::ones({2, 5})).sum().backward();
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    }
    EXPECT_THAT(message, HasSubstr("rank 0 failed"));
  });
}

}  // namespace shard_groups_test
}  // namespace brigade
