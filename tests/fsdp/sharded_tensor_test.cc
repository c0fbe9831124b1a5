#include "brigade/fsdp/sharded_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

namespace brigade {
namespace sharded_tensor_test {

constexpr int kRanks = 2;

Shard piece_of(const at::Tensor& whole, int rank) {
  register_shard_operators();
  const torch::NoGradGuard no_grad;
  const int64_t size = (whole.numel() + kRanks - 1) / kRanks;
  const int64_t begin = std::min(whole.numel(), size * rank);
  const int64_t end = std::min(whole.numel(), begin + size);
  return {.local = whole.detach()
                       .as_strided({whole.numel()}, {1})
                       .narrow(0, begin, end - begin)
                       .clone(),
          .offset = begin};
}

at::Tensor sharded_copy(const at::Tensor& whole, int rank) {
  return make_sharded(piece_of(whole, rank), whole.sizes(), whole.strides());
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

// Owner that unshards parameters while `is_open`, and records calls.
class FakeRoot : public ParameterOwner {
 public:
  bool use_after_forward(std::span<const Shard* const> /*unused*/) override {
    return false;
  }
  void end_use_after_forward(size_t /*unit*/) override {}
  ParameterState use(std::span<const Shard* const> used) override {
    if (!is_open) return ParameterState::kSharded;
    for (const Shard* const shard : used) {
      const size_t unit = shard->unit;
      bind_memory(parameters[unit], wholes[unit].mutable_data_ptr(),
                  wholes[unit].dtype());
      unsharded.push_back(unit);
    }
    return ParameterState::kUnsharded;
  }
  void await_statuses() override {}
  void written(size_t unit) override { writes.push_back(unit); }

  void add(const at::Tensor& parameter, const std::string& name) {
    Shard shard = piece_of(parameter, 0);
    shard.owner = this;
    shard.unit = parameters.size();
    shard.name = name;
    wholes.push_back(parameter.detach().clone());
    shard_in_place(parameter, std::move(shard));
    parameters.push_back(parameter);
  }
  void reshard() {
    for (const at::Tensor& parameter : parameters)
      unbind_memory(parameter, parameter.dtype());
  }

  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> wholes;
  std::vector<size_t> unsharded;
  std::vector<size_t> writes;
  bool is_open = false;
};

TEST(ShardedTensorTest, HasTheUnshardedSizesAndNoData) {
  const auto sharded = sharded_copy(torch::arange(12.).reshape({3, 4}), 1);
  EXPECT_EQ(sharded.sizes(), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(sharded.numel(), 12);
  EXPECT_TRUE(torch::equal(shard_of(sharded)->local, torch::arange(6., 12.)));
  EXPECT_THAT(message_of([&] { sharded.data_ptr(); }),
              ::testing::HasSubstr("is sharded"));
  EXPECT_THAT(message_of([&] { sharded.storage().data(); }),
              ::testing::HasSubstr("is sharded"));
  EXPECT_EQ(shard_of(torch::ones(3)), nullptr);
}

TEST(ShardedTensorTest, HandlesShareTheLocalTensor) {
  const auto sharded = sharded_copy(torch::ones({3, 4}), 0);
  for (const at::Tensor& handle :
       {sharded.detach(), sharded.data(), sharded.alias()}) {
    ASSERT_EQ(shard_of(handle), shard_of(sharded));
    handle.add_(1);
  }
  EXPECT_TRUE(torch::equal(shard_of(sharded)->local, torch::full({6}, 4.)));
}

TEST(ShardedTensorTest, SetDataReplacesTheLocalTensor) {
  FakeRoot root;
  const auto parameter = torch::ones({3, 4}).requires_grad_();
  root.add(parameter, "weight");
  {
    const torch::NoGradGuard no_grad;
    parameter.set_data(parameter.to(torch::kDouble));
  }
  EXPECT_EQ(parameter.scalar_type(), torch::kDouble);
  EXPECT_EQ(shard_of(parameter)->local.scalar_type(), torch::kDouble);
}

TEST(ShardedTensorTest, ShardingAParameterTwiceIsAnError) {
  FakeRoot root;
  const auto parameter = torch::ones({3, 4});
  root.add(parameter, "weight");
  EXPECT_THAT(message_of([&] { shard_in_place(parameter, {.name = "tied"}); }),
              ::testing::HasSubstr("'tied' is sharded already"));
}

TEST(ShardOperatorsTest, ElementwiseOperatorsRunOnLocalTensors) {
  const auto a = torch::randn({3, 5});
  const auto b = torch::randn({3, 5});
  const auto expected = a * b + 2 * a;
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto x = sharded_copy(a, rank);
    const auto result = x * sharded_copy(b, rank) + 2 * x;
    EXPECT_EQ(result.sizes(), a.sizes());
    EXPECT_TRUE(
        torch::equal(shard_of(result)->local, piece_of(expected, rank).local));
  }
}

TEST(ShardOperatorsTest, RefusesOperatorsThatNeedTheUnshardedTensor) {
  FakeRoot root;
  const auto p = torch::randn({4, 4});
  root.add(p, "blocks.0.weight");
  for (const auto& [name, call] :
       std::vector<std::pair<std::string, std::function<void()>>>{
           {"aten::mm", [&] { p.mm(p); }},
           {"aten::t", [&] { p.t(); }},
           {"aten::select.int", [&] { p[0]; }},
           {"aten::view", [&] { p.view({16}); }},
           {"aten::sort", [&] { p.sort(); }},
           {"aten::cat",
            [&] {
              torch::cat({p, p});
            }},
           {"aten::cumsum", [&] { p.cumsum(0); }},
           {"aten::rrelu", [&] { torch::rrelu(p, 0.1, 0.3, true); }},
           {"aten::mul.Tensor", [&] { p.mul(torch::ones({4})); }}}) {
    const std::string message = message_of(call);
    EXPECT_THAT(message, ::testing::HasSubstr("blocks.0.weight")) << name;
    EXPECT_THAT(message, ::testing::HasSubstr(name.substr(0, 9))) << name;
  }
}

TEST(ShardOperatorsTest, RecordingByAutogradIsAnError) {
  FakeRoot root;
  const auto p = torch::ones({4}).requires_grad_();
  root.add(p, "bias");
  EXPECT_THAT(message_of([&] { p.mul(2); }),
              ::testing::HasSubstr("not recorded by autograd"));
  EXPECT_EQ(message_of([&] { torch::zeros_like(p); }), "");
  EXPECT_EQ(message_of([&] { p.detach().mul(2); }), "");
}

TEST(ShardOperatorsTest, WritesAreReportedToTheOwner) {
  FakeRoot root;
  const auto p = torch::ones({4}).requires_grad_();
  root.add(p, "bias");
  const auto version = p._version();
  const torch::NoGradGuard no_grad;
  p.data().mul_(2);
  p.add_(1);
  EXPECT_EQ(root.writes, (std::vector<size_t>{0, 0}));
  EXPECT_GT(p._version(), version);
}

TEST(ShardOperatorsTest, RandomFillsHaveTheBitsOfOneProcess) {
  const auto whole = torch::empty({5, 7});
  torch::manual_seed(3);
  torch::nn::init::kaiming_uniform_(whole);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto sharded = sharded_copy(torch::zeros({5, 7}), rank);
    torch::manual_seed(3);
    torch::nn::init::kaiming_uniform_(sharded);
    EXPECT_TRUE(
        torch::equal(shard_of(sharded)->local, piece_of(whole, rank).local));
  }
}

TEST(ShardOperatorsTest, RandomTensorsLikeAShardHaveTheBitsOfOneProcess) {
  const auto draw = [](const at::Tensor& like) {
    torch::manual_seed(3);
    return std::vector<at::Tensor>{torch::randn_like(like),
                                   torch::rand_like(like),
                                   torch::randint_like(like, 9)};
  };
  const std::vector<at::Tensor> wholes = draw(torch::zeros({5, 7}));
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto drawn = draw(sharded_copy(torch::zeros({5, 7}), rank));
    for (size_t i = 0; i < wholes.size(); ++i) {
      EXPECT_TRUE(torch::equal(shard_of(drawn[i])->local,
                               piece_of(wholes[i], rank).local));
    }
  }
}

TEST(ShardOperatorsTest, UsesInAForwardUnshardParameters) {
  FakeRoot root;
  const auto weight = torch::randn({4, 4}).requires_grad_();
  const auto reference = weight.detach().clone().requires_grad_();
  root.add(weight, "weight");
  const auto x = torch::randn({2, 4});

  root.is_open = true;
  const auto view = weight.t();
  root.reshard();
  auto loss = torch::mm(x, view).square().sum();  // a view unshards too
  root.reshard();
  loss.backward();
  root.reshard();
  root.is_open = false;

  auto expected = torch::mm(x, reference.t()).square().sum();
  expected.backward();
  EXPECT_TRUE(torch::equal(loss, expected));
  EXPECT_TRUE(torch::equal(weight.grad(), reference.grad()));
  EXPECT_EQ(shard_of(weight.grad()), nullptr);
  EXPECT_THAT(root.unsharded, ::testing::SizeIs(::testing::Ge(2)));
}

TEST(ShardOperatorsTest, WritesInAForwardAreRefused) {
  FakeRoot root;
  const auto weight = torch::randn({4, 4});
  root.add(weight, "weight");
  root.is_open = true;
  EXPECT_THAT(message_of([&] { weight.mul_(2); }),
              ::testing::HasSubstr("writes to parameter 'weight'"));
  const auto state = sharded_copy(torch::ones({4, 4}), 0);
  EXPECT_THAT(message_of([&] { weight.mul(state); }),
              ::testing::HasSubstr("belongs to no unit"));
}

// `made_before`: the optimizer is constructed before sharding.
template <typename Optimizer, typename Options>
void expect_steps_like_one_process(Options options, bool made_before) {
  const auto initial = torch::randn({5, 7});
  auto whole = initial.clone().requires_grad_();
  Optimizer reference({whole}, options);
  std::vector<FakeRoot> roots(kRanks);
  std::vector<at::Tensor> parameters;
  std::vector<std::unique_ptr<Optimizer>> optimizers;
  for (int rank = 0; rank < kRanks; ++rank) {
    parameters.push_back(initial.clone().requires_grad_());
    const auto make = [&] {
      optimizers.push_back(std::make_unique<Optimizer>(
          std::vector<at::Tensor>{parameters.back()}, options));
    };
    if (made_before) make();
    Shard shard = piece_of(initial, rank);
    shard.owner = &roots[static_cast<size_t>(rank)];
    shard_in_place(parameters.back(), std::move(shard));
    if (!made_before) make();
  }
  for (int step = 0; step < 4; ++step) {
    const auto gradient = torch::randn({5, 7});
    whole.mutable_grad() = gradient;
    reference.step();
    for (int rank = 0; rank < kRanks; ++rank) {
      auto& parameter = parameters[static_cast<size_t>(rank)];
      parameter.mutable_grad() = sharded_copy(gradient, rank);
      optimizers[static_cast<size_t>(rank)]->step();
      EXPECT_TRUE(torch::equal(shard_of(parameter)->local,
                               piece_of(whole, rank).local));
    }
  }
}

TEST(ShardOperatorsTest, OptimizersStepLocalTensors) {
  namespace optim = torch::optim;
  for (const bool made_before : {false, true}) {
    expect_steps_like_one_process<optim::SGD>(
        optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01), made_before);
    expect_steps_like_one_process<optim::Adam>(
        optim::AdamOptions(0.01).amsgrad(true), made_before);
    expect_steps_like_one_process<optim::AdamW>(optim::AdamWOptions(0.01),
                                                made_before);
    expect_steps_like_one_process<optim::RMSprop>(
        optim::RMSpropOptions(0.01).centered(true).momentum(0.9), made_before);
  }
  // Its constructor makes the state.
  expect_steps_like_one_process<optim::Adagrad>(optim::AdagradOptions(0.01),
                                                /*made_before=*/false);
}

}  // namespace sharded_tensor_test
}  // namespace brigade
