// What LibTorch programs do to modules and their parameters, sharded: as
// without sharding, or an error that says why not.

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/subgroup.h"
#include "brigade/fsdp/fully_shard.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace libtorch_programs_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t size)
      : linear(register_module("linear", torch::nn::Linear(size, size))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (writes) {
      const torch::NoGradGuard no_grad;
      linear->weight.clamp_(-1, 1);
    }
    return x + torch::tanh(linear(x));
  }
  torch::nn::Linear linear;
  bool writes = false;
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", Sharded<Block>(Block(6)))),
        second(register_module("second", Sharded<Block>(Block(6)))),
        head(register_module("head", torch::nn::Linear(6, 2))) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(at::randn(parameter.sizes(), generator) * 0.3);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return head(second(first(x))); }
  Sharded<Block> first;
  Sharded<Block> second;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

at::Tensor input(int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  return at::randn({3, 6}, generator);
}

// Ranks have the same batches, so that averages are one process's gradients.
template <typename Model>
double step(Model& model, torch::optim::Optimizer& optimizer, int number) {
  optimizer.zero_grad();
  const at::Tensor loss = model(input(number)).square().sum();
  loss.backward();
  return loss.template item<double>();
}

struct Strategy {
  std::string name;
  ShardingOptions options;
};

std::vector<Strategy> strategies() {
  return {{"all", {}},
          {"gradients", shard_gradients()},
          {"optimizer state", shard_optimizer_state()},
          {"kept behind backward", {.reshards_after_backward = false}}};
}

// LibTorch's SGD writes past the counts of versions. `between`: where gradients
// are there and it has not stepped.
void expect_sgd_trains(const std::function<void(FullySharded<Net>&)>& between,
                       bool sets_to_none) {
  for (const Strategy& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    run_ranks(2, [&](const Group& group) {
      Net plain;
      FullySharded model(Net(), group, strategy.options);
      torch::optim::SGD expected(plain->parameters(), 0.05);
      torch::optim::SGD found(model.parameters(), 0.05);
      for (int s = 0; s < 4; ++s) {
        expected.zero_grad(sets_to_none);
        found.zero_grad(sets_to_none);
        const at::Tensor loss = plain->forward(input(s)).square().sum();
        loss.backward();
        const at::Tensor own = model(input(s)).square().sum();
        own.backward();
        EXPECT_EQ(own.item<double>(), loss.item<double>()) << "step " << s;
        between(model);
        expected.step();
        found.step();
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(model(input(9)), plain->forward(input(9))));
      }
    });
  }
}

TEST(LibTorchProgramsTest, ItsSgdTrains) {
  expect_sgd_trains([](auto&) {}, /*sets_to_none=*/true);
  expect_sgd_trains([](auto&) {}, /*sets_to_none=*/false);
}

TEST(LibTorchProgramsTest, ItsSgdTrainsBehindForwardsWithoutBackward) {
  expect_sgd_trains([](FullySharded<Net>& model) { model(input(8)); },
                    /*sets_to_none=*/true);
}

TEST(LibTorchProgramsTest, ItsSgdTrainsBehindUnshardedScopes) {
  expect_sgd_trains(
      [](FullySharded<Net>& model) { const auto whole = model.unsharded(); },
      /*sets_to_none=*/true);
}

TEST(LibTorchProgramsTest, AModuleIsLoadedWhileItIsWhole) {
  std::stringstream archive;
  Net trained;
  {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : trained->parameters()) parameter.mul_(-2);
  }
  torch::save(trained, archive);
  const std::string bytes = archive.str();
  run_ranks(2, [&](const Group& group) {
    Net net;
    FullySharded model(net, group);
    {
      const auto whole = model.unsharded(/*writes=*/true);
      std::stringstream copy(bytes);
      torch::load(net, copy);
    }
    Net plain;
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : plain->parameters()) parameter.mul_(-2);
    }
    torch::optim::Adam expected(plain->parameters(), 0.05);
    torch::optim::Adam found(model.parameters(), 0.05);
    for (int s = 0; s < 3; ++s) {
      expected.zero_grad();
      const at::Tensor loss = plain->forward(input(s)).square().sum();
      loss.backward();
      EXPECT_EQ(step(model, found, s), loss.item<double>()) << "step " << s;
      expected.step();
      found.step();
    }
  });
}

TEST(LibTorchProgramsTest, ACastWhileItIsWholeIsRefused) {
  run_ranks(2, [](const Group& group) {
    Net net;
    FullySharded model(net, group);
    EXPECT_THAT(
        [&] {
          const auto whole = model.unsharded(/*writes=*/true);
          net->to(at::kDouble);
        },
        ThrowsMessage<c10::ValueError>(HasSubstr("was cast to Double")));
    Net plain;
    const at::Tensor loss = plain->forward(input(0)).square().sum();
    EXPECT_EQ(model(input(0)).square().sum().item<double>(),
              loss.item<double>());
  });
}

TEST(LibTorchProgramsTest, WritesInForwardAreRefused) {
  run_ranks(2, [](const Group& group) {
    Net net;
    FullySharded model(net, group);
    net->first->module()->writes = true;
    EXPECT_THAT([&] { model(input(0)); },
                ThrowsMessage<c10::NotImplementedError>(
                    AllOf(HasSubstr("'first.linear.weight'"),
                          HasSubstr("was written to in forward"))));
    net->first->module()->writes = false;
    model(input(0)).sum().backward();
  });
}

TEST(LibTorchProgramsTest, WhatIsRegisteredBehindShardingIsRefused) {
  run_ranks(2, [](const Group& group) {
    Net net;
    FullySharded model(net, group);
    net->register_module("late", torch::nn::Linear(2, 2));
    EXPECT_THAT([&] { model(input(0)); },
                ThrowsMessage<c10::Error>(HasSubstr("'late.weight'")));
  });
}

TEST(LibTorchProgramsTest, ParametersOfTheModuleAreFrozenAndThawed) {
  run_ranks(2, [](const Group& group) {
    Net net;
    FullySharded model(net, group);
    for (const bool is_frozen : {true, false, true}) {
      net->head->weight.set_requires_grad(!is_frozen);
      for (const at::Tensor& shard : model.parameters()) {
        shard.mutable_grad().reset();
      }
      model(input(0)).square().sum().backward();
      for (const NamedShard& named : model.named_shards()) {
        const bool is_it = named.name == "head.weight";
        EXPECT_EQ(named.shard.grad().defined(), !(is_it && is_frozen))
            << named.name;
      }
    }
  });
}

TEST(LibTorchProgramsTest, ABackwardInsideOfUnshardedLeavesNothing) {
  run_ranks(2, [](const Group& group) {
    Net net;
    FullySharded model(net, group);
    torch::optim::Adam optimizer(model.parameters(), 0.05);
    {
      const auto whole = model.unsharded();
      EXPECT_THAT([&] { net->forward(input(1)).sum().backward(); },
                  ThrowsMessage<c10::Error>(HasSubstr("inside of unshard")));
    }
    Net plain;
    const at::Tensor loss = plain->forward(input(0)).square().sum();
    loss.backward();
    step(model, optimizer, 0);
    // It is all on the last rank.
    for (const NamedShard& named : model.named_shards()) {
      if (named.name != "head.bias" || named.shard.numel() == 0) continue;
      EXPECT_TRUE(at::equal(named.shard.grad(), plain->head->bias.grad()));
    }
  });
}

TEST(LibTorchProgramsTest, NamesAndSizesTellGroupsOfAnOptimizer) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(Net(), group);
    std::vector<std::string> decayed;
    for (const NamedShard& named : model.named_shards()) {
      if (named.whole_sizes.size() > 1) decayed.push_back(named.name);
    }
    EXPECT_THAT(decayed,
                ::testing::ElementsAre("head.weight", "first.linear.weight",
                                       "second.linear.weight"));
  });
}

struct OfSequentialImpl : torch::nn::Module {
  OfSequentialImpl()
      : layers(register_module(
            "layers", Sharded<torch::nn::Sequential>(torch::nn::Sequential(
                          torch::nn::Linear(6, 6), torch::nn::Tanh())))) {}
  at::Tensor forward(const at::Tensor& x) { return layers(x); }
  Sharded<torch::nn::Sequential> layers;
};
TORCH_MODULE(OfSequential);

TEST(LibTorchProgramsTest, ASequentialMayBeAUnit) {
  run_ranks(2, [](const Group& group) {
    FullySharded model(OfSequential(), group);
    model(input(0)).sum().backward();
    EXPECT_TRUE(model.parameters()[0].grad().defined());
  });
}

TEST(LibTorchProgramsTest, NoGroupIsAnError) {
  const auto is_named =
      ThrowsMessage<c10::ValueError>(HasSubstr("process group is null"));
  EXPECT_THAT([] { FullySharded<Net> model(Net(), nullptr); }, is_named);
  EXPECT_THAT([] { make_subgroup(nullptr, {0}); }, is_named);
}

}  // namespace libtorch_programs_test
}  // namespace brigade
