#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/hooks/activation_checkpoint.h"
#include "brigade/tests/ddp/toy_module.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace mixed_precision_test {

using ::testing::ElementsAre;
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

// Parameters: gradient_as_bucket_view, set_to_none, dtype of the all-reduce.
class MixedPrecisionTest
    : public ::testing::TestWithParam<std::tuple<bool, bool, at::ScalarType>> {
 protected:
  DistributedDataParallelOptions options() const {
    return {
        .reducer = {.bucket_cap_bytes = {40},
                    .gradient_as_bucket_view = std::get<0>(GetParam())},
        .mixed_precision = MixedPrecision{
            .parameters = at::kBFloat16, .reduction = std::get<2>(GetParam())}};
  }
  bool set_to_none() const { return std::get<1>(GetParam()); }
};

TEST_P(MixedPrecisionTest, AveragesGradientsInFullPrecision) {
  run_ranks(2, [&](const Group& group) {
    ToyModule module;
    DistributedDataParallel model(module, group, options());
    for (int s = 0; s < 5; ++s) {
      module->toy.zero_grad(set_to_none());
      model(kAll, group->getRank(), s).backward();
      EXPECT_EQ(module->precision, at::kBFloat16);
      expect_averages(module->toy, 2, s);
    }
    EXPECT_EQ(model.reducer().statistics().reduced, 5);
    EXPECT_EQ(model.reducer().statistics().rebuilds, 1);
  });
}

TEST_P(MixedPrecisionTest, AccumulatesInsideNoSync) {
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
    ::testing::Values(std::tuple(true, true, at::kBFloat16),
                      std::tuple(true, false, at::kFloat),
                      std::tuple(false, true, at::kFloat),
                      std::tuple(false, false, at::kBFloat16)));

TEST(MixedPrecisionStepsTest, BatchNorm) {
  torch::nn::BatchNorm1d norm(3);
  DistributedDataParallel model(
      norm, single_process_group(),
      {.mixed_precision = MixedPrecision{.buffers = at::kBFloat16}});
  const at::Tensor input = at::arange(12.0).reshape({4, 3});
  model(input).square().sum().backward();
  EXPECT_EQ(norm->weight.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(norm->running_mean.scalar_type(), at::kBFloat16);
  norm->eval();
  const at::NoGradGuard no_grad;
  EXPECT_EQ(model(input).scalar_type(), at::kBFloat16);
  EXPECT_EQ(norm->weight.scalar_type(), at::kFloat);
}

TEST(MixedPrecisionStepsTest, SparseGradients) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Embedding rows(torch::nn::EmbeddingOptions(4, 3).sparse(true));
    DistributedDataParallel model(
        rows, group,
        {.reducer = {.expect_sparse_gradients = {true}},
         .mixed_precision = kHalfPrecision});
    for (int s = 0; s < 2; ++s) {
      rows->weight.mutable_grad().reset();
      model(at::full({2}, group->getRank(), at::kLong)).sum().backward();
      EXPECT_EQ(rows->weight.grad().scalar_type(), at::kFloat);
      at::Tensor expected = at::zeros({4, 3});
      expected.slice(0, 0, 2).fill_(1);
      EXPECT_TRUE(at::equal(rows->weight.grad().to_dense(), expected));
    }
  });
}

TEST(MixedPrecisionStepsTest, FrozenAndIgnoredParameters) {
  struct Net : torch::nn::Module {
    at::Tensor forward() {
      dtypes = {own.scalar_type(), frozen.scalar_type(), kept.scalar_type()};
      return own.sum();
    }
    at::Tensor own = register_parameter("own", at::ones({1}));
    at::Tensor frozen =
        register_parameter("frozen", at::ones({1}), /*requires_grad=*/false);
    at::Tensor kept = register_parameter("kept", at::ones({1}));
    std::vector<at::ScalarType> dtypes;
  };
  DistributedDataParallel model(
      std::make_shared<Net>(), single_process_group(),
      {.ignored = {"kept"}, .mixed_precision = kHalfPrecision});
  model().backward();
  EXPECT_THAT(model.module()->dtypes,
              ElementsAre(at::kBFloat16, at::kBFloat16, at::kFloat));
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

TEST(MixedPrecisionFailureTest, CheckpointsWithStepsInBackwardAreRefused) {
  struct Net : torch::nn::Module {
    Net() { register_module("linear", linear); }
    at::Tensor forward(const at::Tensor& x) {
      return checkpoint([this](const at::Tensor& y) { return linear(y); }, x);
    }
    torch::nn::Linear linear = torch::nn::Linear(3, 2);
  };
  const Group group = single_process_group();
  DistributedDataParallel model(
      std::make_shared<Net>(), group,
      {.reducer = {.comm_hook = step_in_backward(all_reduce_hook(group),
                                                 [](const at::Tensor&) {})},
       .mixed_precision = kHalfPrecision});
  try {
    model(at::ones({4, 3}));
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("Remove the checkpoint"));
  }
  model.reducer().set_comm_hook(nullptr);
  model(at::ones({4, 3})).sum().backward();
  EXPECT_TRUE(
      at::equal(model.module()->linear->bias.grad(), at::full({2}, 4.0)));
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

TEST(MixedPrecisionFailureTest, AParameterWrittenInForwardIsNamed) {
  ToyModule module;
  DistributedDataParallel model(module, single_process_group(),
                                {.mixed_precision = kHalfPrecision});
  module->writes = 1;
  try {
    model(kAll, 0, 0);
    FAIL() << "nothing was thrown";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("parameter p1 was written"));
  }
  module->writes = std::nullopt;
  model(kAll, 0, 1).backward();
  expect_averages(module->toy, 1, 1);
}

TEST(MixedPrecisionFailureTest, ConflictingOptionsAreNamed) {
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
  EXPECT_THAT(text({.mixed_precision = MixedPrecision{.parameters = at::kInt}}),
              HasSubstr("dtypes must be"));
}

}  // namespace mixed_precision_test
}  // namespace brigade
