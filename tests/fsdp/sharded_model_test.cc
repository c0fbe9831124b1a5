// ShardedModel between and around the programs that sharded_programs_test.cc
// draws and the faults of sharded_scenarios_test.cc.

#include "brigade/fsdp/sharded_model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/fsdp/fully_shard.h"
#include "brigade/fsdp/sharded_tensor.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharded_model_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Property;
using testing::run_ranks;
using ::testing::Throws;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t size)
      : lin(register_module("lin", torch::nn::Linear(size, size))),
        gain(register_parameter("gain", torch::ones({size}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x + torch::tanh(lin(x)) * gain;
  }
  torch::nn::Linear lin;
  at::Tensor gain;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl() : head(register_module("head", torch::nn::Linear(5, 3))) {
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) blocks->push_back(Block(5));
    // Ranks are threads: each writes from generators of its own.
    const torch::NoGradGuard no_grad;
    uint64_t seed = 7;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(random(parameter.sizes(), seed++).mul_(0.3));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) {
      x = block->as<Block>()->forward(x);
    }
    return head(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

at::Tensor data_of(int rank, int step) {
  return random({4, 5}, static_cast<uint64_t>(100 * step + rank));
}

// The average over ranks of the losses' gradients, of one process.
at::Tensor loss_of_all(Net& net, int num_ranks, int step) {
  at::Tensor loss = torch::zeros({});
  for (int rank = 0; rank < num_ranks; ++rank) {
    loss = loss + net(data_of(rank, step)).square().mean();
  }
  return loss / num_ranks;
}

void expect_equal_parameters(const torch::nn::Module& plain,
                             const torch::nn::Module& sharded) {
  const auto expected = plain.named_parameters();
  for (const auto& item : sharded.named_parameters()) {
    const at::Tensor whole = gather_whole(item.value());
    EXPECT_TRUE(torch::allclose(whole, expected[item.key()], 1e-5, 1e-6))
        << item.key() << "\n"
        << whole << "\n"
        << expected[item.key()];
  }
}

TEST(ShardedModelTest, ReplaysWithoutRounds) {
  run_ranks(2, [](const Group& group) {
    Net net;
    const auto sharded = fully_shard(*net, group);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = sharded->forward(
          [&] { return net->forward(data_of(group->getRank(), 0)).sum(); });
      loss.backward();
    }
    const ShardedModelStatistics before = sharded->statistics();
    const at::Tensor loss = sharded->forward(
        [&] { return net->forward(data_of(group->getRank(), 0)).sum(); });
    loss.backward();
    const ShardedModelStatistics after = sharded->statistics();
    EXPECT_EQ(after.learned_segments, before.learned_segments);
    EXPECT_EQ(after.rounds, before.rounds);
    // The outermost unit stays; two of three blocks are gathered again in
    // backward, the last one is still there.
    EXPECT_LE(after.all_gathers - before.all_gathers, 7);
  });
}

TEST(ShardedModelTest, RanksUseUnitsInOtherOrdersAndSkipThem) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    const auto run = [](Net& of, const at::Tensor& input, int rank, int step) {
      at::Tensor x = input;
      const size_t first = static_cast<size_t>((rank + step) % 3);
      for (size_t i = 0; i < (step == 2 && rank == 1 ? 1u : 3u); ++i) {
        x = of->blocks[(first + i) % 3]->as<Block>()->forward(x);
      }
      return of->head(x).square().mean();
    };
    torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto sharded = fully_shard(*net, group);
    for (int step = 0; step < 6; ++step) {
      plain_optimizer.zero_grad();
      const at::Tensor both = run(plain, data_of(0, step), 0, step) +
                              run(plain, data_of(1, step), 1, step);
      (both / 2).backward();
      plain_optimizer.step();
      optimizer.zero_grad();
      const at::Tensor loss = sharded->forward(
          [&] { return run(net, data_of(rank, step), rank, step); });
      loss.backward();
      optimizer.step();
    }
    expect_equal_parameters(*plain, *net);
  });
}

struct CountingHook : torch::autograd::PostAccumulateGradHook {
  explicit CountingHook(std::vector<bool>& had_gradient)
      : had_gradient(had_gradient) {}
  void operator()(const at::Tensor& parameter) override {
    had_gradient.push_back(parameter.grad().defined());
  }
  std::vector<bool>& had_gradient;
};

TEST(ShardedModelTest, HooksAfterAccumulationRunOnceWithTheShardsGradient) {
  run_ranks(2, [](const Group& group) {
    Net net;
    const auto sharded = fully_shard(*net, group);
    std::vector<bool> had_gradient;
    torch::autograd::impl::set_post_acc_grad_hooks(
        net->head->weight, std::make_unique<CountingHook>(had_gradient));
    for (int step = 0; step < 3; ++step) {
      sharded
          ->forward(
              [&] { return net->forward(data_of(group->getRank(), step)); })
          .sum()
          .backward();
    }
    EXPECT_THAT(had_gradient, ElementsAre(true, true, true));
  });
}

TEST(ShardedModelTest, UnshardedParametersCanBeReadAndWritten) {
  run_ranks(2, [](const Group& group) {
    Net plain;
    Net net;
    const auto sharded = fully_shard(*net, group);
    const std::vector<size_t> all = {0, 1, 2, 3};
    sharded->unshard(all);
    EXPECT_TRUE(torch::equal(net->head->weight, plain->head->weight));
    EXPECT_ANY_THROW({
      const torch::NoGradGuard no_grad;
      net->head->weight.fill_(1);
    });
    sharded->reshard(all);
    sharded->unshard(all, /*may_write=*/true);
    {
      const torch::NoGradGuard no_grad;
      net->head->weight.copy_(torch::eye(3, 5));
    }
    sharded->reshard(all);
    EXPECT_TRUE(
        torch::equal(gather_whole(net->head->weight), torch::eye(3, 5)));
  });
}

struct ScaleImpl : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", torch::full({3}, 2.0F));
};

FullyShardOptions in_bfloat16() {
  return {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat};
}

TEST(ShardedModelTest, NestsOfInputsAndOutputsAreCast) {
  run_ranks(2, [](const Group& group) {
    ScaleImpl net;
    const auto model = fully_shard(net, group, in_bfloat16());
    const at::Tensor x = torch::tensor({{1.0F, 2.0F, -1.0F}}).requires_grad_();
    const auto [scores, kept] = model->forward(
        [&](const at::Tensor& in,
            const std::map<std::string, at::Tensor>& others) {
          EXPECT_EQ(in.scalar_type(), at::kBFloat16);
          EXPECT_EQ(net.weight.scalar_type(), at::kBFloat16);
          EXPECT_EQ(others.at("wide").scalar_type(), at::kBFloat16);
          EXPECT_EQ(others.at("places").scalar_type(), at::kLong);
          const at::Tensor y = in * net.weight;
          EXPECT_EQ(y.scalar_type(), at::kBFloat16);
          return std::pair(y,
                           std::vector<at::Tensor>{others.at("places"), y + 1});
        },
        x,
        std::map<std::string, at::Tensor>{
            {"wide", torch::ones({3})},
            {"places", torch::ones({3}, at::kLong)}});
    EXPECT_EQ(scores.scalar_type(), at::kFloat);
    EXPECT_EQ(kept[0].scalar_type(), at::kLong);
    EXPECT_EQ(kept[1].scalar_type(), at::kFloat);
    scores.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), torch::full({1, 3}, 2.0F)));
    EXPECT_EQ(net.weight.scalar_type(), at::kFloat);
    EXPECT_EQ(net.weight.grad().scalar_type(), at::kFloat);
  });
}

TEST(ShardedModelTest, AnOutputThatCantBeReplacedIsAnErrorOnAllRanks) {
  run_ranks(2, [](const Group& group) {
    ScaleImpl net;
    const auto model = fully_shard(net, group, in_bfloat16());
    const at::Tensor x = torch::ones({3});
    EXPECT_THAT(
        [&] {
          model->forward(
              [&](const at::Tensor& in) {
                return std::tuple<const at::Tensor>(in * net.weight);
              },
              x);
        },
        Throws<c10::ValueError>(Property(&c10::Error::what_without_backtrace,
                                         HasSubstr("constant"))));
    model->forward([&] { return x.to(at::kBFloat16) * net.weight; })
        .sum()
        .backward();
    EXPECT_TRUE(net.weight.grad().defined());
  });
}

TEST(ShardedModelTest, NormsAndClippingAreGlobal) {
  run_ranks(2, [](const Group& group) {
    Net plain;
    Net net;
    const auto sharded = fully_shard(*net, group);
    loss_of_all(plain, 2, 0).backward();
    sharded
        ->forward([&] {
          return net->forward(data_of(group->getRank(), 0)).square().mean();
        })
        .backward();
    const double expected =
        torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.01);
    EXPECT_NEAR(sharded->clip_grad_norm(1e9), expected, 1e-6);
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01),
                expected, 1e-6);
    EXPECT_TRUE(torch::allclose(gather_whole(net->head->weight.grad()),
                                plain->head->weight.grad(), 1e-5, 1e-7));
  });
}

}  // namespace sharded_model_test
}  // namespace brigade
