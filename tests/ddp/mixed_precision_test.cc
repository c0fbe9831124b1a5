#include <torch/torch.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/all_reduce_hook.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/ddp/distributed_replicas.h"
#include "brigade/ddp/join.h"
#include "brigade/tests/ddp/toy_module.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;
using testing::Order;
using testing::run_ranks;
using testing::ToyModel;
using testing::ToyModule;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const Order kAll = {0, 1, 2, 3};
constexpr MixedPrecision kHalfPrecision = {.parameters = at::kBFloat16};

void expect_full_precision(const ToyModel& toy) {
  for (const at::Tensor& p : toy.parameters) {
    EXPECT_EQ(p.scalar_type(), at::kFloat);
    if (p.grad().defined()) {
      EXPECT_EQ(p.grad().scalar_type(), at::kFloat);
    }
  }
}

void expect_averages(const ToyModel& toy, int world_size, int step) {
  expect_full_precision(toy);
  for (const size_t i : kAll) {
    EXPECT_TRUE(
        at::equal(toy.parameters[i].grad(), toy.average(i, world_size, step)))
        << "parameter " << i << " step " << step;
  }
}

// Gradients as views x set to None x what travels.
class MixedPrecisionTest
    : public ::testing::TestWithParam<std::tuple<bool, bool, at::ScalarType>> {
 protected:
  DistributedDataParallelOptions options() const {
    return {
        .reducer = {.bucket_caps_bytes = {40},
                    .gradients_as_bucket_views = std::get<0>(GetParam())},
        .mixed_precision = MixedPrecision{
            .parameters = at::kBFloat16, .reduction = std::get<2>(GetParam())}};
  }
  bool set_to_none() const { return std::get<1>(GetParam()); }
};

TEST_P(MixedPrecisionTest, AveragesGradientsInFullPrecision) {
  run_ranks(2, [&](const Group& group) {
    ToyModule module;
    DistributedDataParallel model(module, group, options());
    at::ScalarType in_backward = at::kFloat;
    module->toy.parameters[0].register_hook([&](const at::Tensor& gradient) {
      in_backward = gradient.scalar_type();
    });
    for (int s = 0; s < 5; ++s) {
      module->toy.zero_grad(set_to_none());
      model(kAll, group->getRank(), s).backward();
      EXPECT_EQ(in_backward, at::kBFloat16);
      expect_averages(module->toy, 2, s);
    }
    EXPECT_EQ(model.reducer().statistics().reduced, 5);
    EXPECT_EQ(model.reducer().statistics().rebuilds, 1);
  });
}

TEST_P(MixedPrecisionTest, AccumulatesWithoutSynchronising) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    ToyModule module;
    DistributedDataParallel model(module, group, options());
    for (int s = 0; s < 3; ++s) {
      module->toy.zero_grad(set_to_none());
      {
        const auto local = model.no_sync();
        model(kAll, rank, s).backward();
        expect_full_precision(module->toy);
      }
      model(kAll, rank, s).backward();
      for (const size_t i : kAll) {
        EXPECT_TRUE(at::equal(module->toy.parameters[i].grad(),
                              2 * module->toy.average(i, 2, s)));
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Modes, MixedPrecisionTest,
    ::testing::Combine(::testing::Bool(), ::testing::Bool(),
                       ::testing::Values(at::kBFloat16, at::kFloat)));

TEST(MixedPrecisionStepsTest, OptimizersStepInFullPrecision) {
  run_ranks(2, [](const Group& group) {
    ToyModule module;
    DistributedDataParallel model(module, group,
                                  {.mixed_precision = kHalfPrecision});
    torch::optim::SGD optimizer(module->parameters(), /*lr=*/1.0 / 4096);
    std::vector<at::Tensor> expected;
    for (const at::Tensor& p : module->toy.parameters) {
      expected.push_back(p.detach().clone());
    }
    for (int s = 0; s < 3; ++s) {
      optimizer.zero_grad();
      model(kAll, group->getRank(), s).backward();
      optimizer.step();
      for (const size_t i : kAll) {
        expected[i] = expected[i] - module->toy.average(i, 2, s) / 4096;
        EXPECT_TRUE(at::equal(module->toy.parameters[i], expected[i]));
      }
    }
  });
}

TEST(MixedPrecisionStepsTest, CastsTensorsAmongTheArguments) {
  torch::nn::Linear linear(3, 2);
  DistributedDataParallel model(linear, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  for (int s = 0; s < 2; ++s) {
    const at::Tensor input = at::ones({4, 3});
    const at::Tensor output = model(input);
    EXPECT_EQ(output.scalar_type(), at::kBFloat16);
    output.sum().backward();
    EXPECT_EQ(linear->weight.scalar_type(), at::kFloat);
  }
}

TEST(MixedPrecisionStepsTest, EvaluatesInLowPrecision) {
  torch::nn::Linear linear(3, 2);
  DistributedDataParallel model(linear, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  const at::Tensor weight = linear->weight.detach().clone();
  const at::NoGradGuard no_grad;
  EXPECT_EQ(model(at::ones({4, 3})).scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(linear->weight, weight));
}

TEST(MixedPrecisionStepsTest, BuffersAreCastOnce) {
  ToyModule module;
  const DistributedDataParallel model(
      module, single_process_group(),
      {.mixed_precision = MixedPrecision{.buffers = at::kHalf}});
  EXPECT_EQ(module->seen.scalar_type(), at::kHalf);
}

TEST(MixedPrecisionStepsTest, StaticGraphs) {
  run_ranks(2, [](const Group& group) {
    ToyModule module;
    DistributedDataParallel model(
        module, group,
        {.reducer = {.static_graph = true}, .mixed_precision = kHalfPrecision});
    for (int s = 0; s < 4; ++s) {
      module->toy.zero_grad();
      model(kAll, group->getRank(), s).backward();
      expect_averages(module->toy, 2, s);
    }
  });
}

TEST(MixedPrecisionStepsTest, LocalReplicas) {
  std::vector<ToyModule> modules(2);
  DistributedReplicas<ToyModule> model(modules, single_process_group(),
                                       {.mixed_precision = kHalfPrecision});
  for (int s = 0; s < 3; ++s) {
    std::vector<std::tuple<Order, int, int>> inputs;
    for (int copy = 0; copy < 2; ++copy) {
      modules[copy]->toy.zero_grad();
      inputs.emplace_back(kAll, copy, s);
    }
    const std::vector<at::Tensor> losses = model(inputs);
    (losses[0] + losses[1]).backward();
    for (const ToyModule& module : modules) {
      expect_averages(module->toy, 2, s);
    }
  }
}

TEST(MixedPrecisionStepsTest, RanksThatRunOutOfDataShadow) {
  run_ranks(2, [](const Group& group) {
    const int rank = group->getRank();
    ToyModule module;
    DistributedDataParallel model(module, group,
                                  {.mixed_precision = kHalfPrecision});
    join(model, [&] {
      for (int s = 0; s < 2 + 2 * rank; ++s) {
        module->toy.zero_grad();
        model(kAll, rank, s).backward();
        expect_full_precision(module->toy);
        if (s < 2) {
          expect_averages(module->toy, 2, s);
        } else {
          EXPECT_TRUE(at::equal(module->toy.parameters[1].grad(),
                                module->toy.gradient(1, rank, s) / 2));
        }
      }
    });
    expect_full_precision(module->toy);
  });
}

TEST(MixedPrecisionFailureTest, AForwardThatThrowsLeavesFullPrecision) {
  ToyModule module;
  DistributedDataParallel model(module, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  module->fails = true;
  EXPECT_THROW(model(kAll, 0, 0), std::domain_error);
  expect_full_precision(module->toy);
  module->fails = false;
  model(kAll, 0, 1).backward();
  expect_averages(module->toy, 1, 1);
}

TEST(MixedPrecisionFailureTest, ABackwardThatThrowsLeavesFullPrecision) {
  ToyModule module;
  DistributedDataParallel model(module, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  bool throws = true;
  module->toy.parameters[2].register_hook([&](const at::Tensor&) {
    if (throws) throw std::domain_error("in backward");
  });
  EXPECT_ANY_THROW(model(kAll, 0, 0).backward());
  expect_full_precision(module->toy);
  throws = false;
  module->toy.zero_grad();
  model(kAll, 0, 1).backward();
  expect_averages(module->toy, 1, 1);
}

TEST(MixedPrecisionFailureTest, AForwardWithoutBackwardIsUndone) {
  ToyModule module;
  const at::Tensor& parameter = module->toy.parameters[0];
  {
    const at::NoGradGuard no_grad;
    parameter.fill_(1.0 / 3);
  }
  const at::Tensor before = parameter.detach().clone();
  {
    DistributedDataParallel model(module, single_process_group(),
                                  {.mixed_precision = kHalfPrecision});
    model(kAll, 0, 0);
    EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
    model(kAll, 0, 1).backward();
    EXPECT_TRUE(at::equal(parameter, before));
    expect_averages(module->toy, 1, 1);
    model(kAll, 0, 2);
  }
  EXPECT_TRUE(at::equal(parameter, before));
}

TEST(MixedPrecisionFailureTest, OptionsThatDoNotFitAreNamed) {
  const auto text = [](DistributedDataParallelOptions options) {
    try {
      const DistributedDataParallel model(ToyModule(), single_process_group(),
                                          std::move(options));
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string("nothing was thrown");
  };
  const Group group = single_process_group();
  EXPECT_THAT(text({.reducer = {.comm_hook = all_reduce_hook(group)},
                    .mixed_precision = MixedPrecision{.reduction = at::kHalf}}),
              HasSubstr("mixed_precision.reduction must be unset"));
  EXPECT_THAT(text({.reducer = {.find_unused_parameters = true},
                    .mixed_precision = kHalfPrecision}),
              HasSubstr("set reducer.static_graph"));
  EXPECT_THAT(text({.mixed_precision = MixedPrecision{.parameters = at::kInt}}),
              HasSubstr("floating-point"));
}

}  // namespace
}  // namespace brigade
