// `reproducible`: bits of averages depend on the ranks' gradients alone.

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace reproducible_test {

using testing::expect_trains;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::step;
using testing::ToyModel;
using testing::UserError;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const std::vector<int64_t> kSizes = {3, 1000, 1, 70, 20000};

// Magnitudes vary, so the order of additions changes the bits.
at::Tensor gradient_of(size_t parameter, int rank, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      100 * parameter + static_cast<uint64_t>(rank));
  const std::vector<int64_t> size = {kSizes[parameter]};
  return (at::randn(size, generator, at::kDouble) *
          at::pow(10, at::randint(-2, 3, size, generator, at::kDouble)))
      .to(dtype);
}

at::Tensor average_of(size_t parameter, int world_size, at::ScalarType dtype) {
  at::Tensor sum = gradient_of(parameter, 0, dtype).to(at::kFloat);
  for (int rank = 1; rank < world_size; ++rank) {
    sum += gradient_of(parameter, rank, dtype).to(at::kFloat);
  }
  return (sum * (1.0 / world_size)).to(dtype);
}

// Order in which the loss uses parameters, and so their gradients become ready.
enum class Uses { kInOrder, kBackwards, kAllButOne };

at::Tensor loss_of(const std::vector<at::Tensor>& parameters, int rank,
                   Uses uses) {
  at::Tensor loss = at::zeros({});
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t p = uses == Uses::kBackwards ? parameters.size() - 1 - i : i;
    if (uses == Uses::kAllButOne && p == 1 && rank == 0) continue;
    const at::ScalarType dtype = parameters[p].scalar_type();
    loss = loss + (parameters[p] * gradient_of(p, rank, dtype)).sum();
  }
  return loss;
}

void expect_ordered_averages(const Group& group, ReducerOptions options,
                             at::ScalarType dtype, Uses uses) {
  if (!options.comm_hook) options.reproducible = true;
  const int world_size = group->getSize();
  std::vector<at::Tensor> parameters;
  for (const int64_t numel : kSizes) {
    parameters.push_back(at::zeros({numel}, dtype).requires_grad_());
  }
  Reducer reducer(parameters, group, options);
  for (int iteration = 0; iteration < 3; ++iteration) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
    step(reducer, loss_of(parameters, group->getRank(), uses));
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (uses == Uses::kAllButOne && i == 1) continue;
      EXPECT_TRUE(
          at::equal(parameters[i].grad(), average_of(i, world_size, dtype)))
          << dtype << ", parameter " << i << ", iteration " << iteration;
    }
  }
}

class ReproducibleTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ReproducibleTest,
                         ::testing::Values(1, 2, 3, 4));

TEST_P(ReproducibleTest, BitsDoNotDependOnCapsViewsGraphsAndOrders) {
  run_ranks(GetParam(), [](const Group& group) {
    for (const int64_t cap : {1 << 10, 1 << 20, 25 << 20}) {
      for (const bool is_static : {false, true}) {
        expect_ordered_averages(group,
                                {.bucket_cap_bytes = {cap},
                                 .static_graph = is_static,
                                 .gradient_as_bucket_view = !is_static},
                                at::kFloat,
                                is_static ? Uses::kInOrder : Uses::kBackwards);
      }
    }
  });
}

// The empty plan is rebuilt after the first step.
TEST_P(ReproducibleTest, BitsDoNotDependOnTheBucketsOfTheOrderedHook) {
  const std::vector<std::vector<std::vector<size_t>>> plans = {
      {{4, 3, 2, 1, 0}}, {{4}, {3}, {2}, {1}, {0}}, {{0, 4}, {1, 3, 2}}, {}};
  run_ranks(GetParam(), [&](const Group& group) {
    const auto hook = ordered_hook(group);
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
      for (const auto& plan : plans) {
        expect_ordered_averages(group,
                                {.bucket_cap_bytes = {2048},
                                 .bucket_plan = plan,
                                 .comm_hook = hook},
                                dtype, Uses::kInOrder);
      }
    }
  });
}

TEST_P(ReproducibleTest, UnusedParametersCountAsZeros) {
  run_ranks(GetParam(), [](const Group& group) {
    expect_ordered_averages(
        group, {.bucket_cap_bytes = {2048}, .find_unused_parameters = true},
        at::kFloat, Uses::kAllButOne);
  });
}

TEST_P(ReproducibleTest, WithoutVerificationRanksConnectInTheFirstStep) {
  run_ranks(GetParam(), [](const Group& group) {
    expect_ordered_averages(
        group, {.bucket_cap_bytes = {2048}, .verify_across_ranks = false},
        at::kFloat, Uses::kInOrder);
  });
}

TEST_P(ReproducibleTest, AllRanksTrainOnAfterOneFailsInBackward) {
  run_ranks(
      GetParam(),
      [](const Group& group) {
        const int rank = group->getRank();
        const ToyModel model({{2}, {3}, {5}});
        Reducer reducer(model.parameters, group,
                        {.bucket_plan = {{2}, {1}, {0}}, .reproducible = true});
        expect_trains(reducer, model, rank, GetParam(), 1);
        bool armed = rank == GetParam() - 1;
        model.parameters[1].register_hook([&](const at::Tensor&) {
          if (armed) throw UserError("user error");
        });
        EXPECT_ANY_THROW(step(reducer, model.loss(rank)));
        armed = false;
        expect_trains(reducer, model, rank, GetParam(), 2);
      },
      std::chrono::minutes(10));
}

TEST(ReproducibleFailureTest, ARankThatLeavesEndsItsPeersStep) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model({{2}, {3}});
        std::optional<Reducer> reducer(
            std::in_place, model.parameters, group,
            ReducerOptions{.bucket_plan = {{1}, {0}}, .reproducible = true});
        expect_trains(*reducer, model, group->getRank(), 2);
        if (group->getRank() == 1) {
          reducer.reset();
        } else {
          EXPECT_THROW(step(*reducer, model.loss(0)), c10::DistBackendError);
        }
      },
      std::chrono::minutes(10));
}

std::string refusal_of(const Group& group, ReducerOptions options) {
  const ToyModel model({{2}, {3}});
  try {
    Reducer(model.parameters, group, options);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "accepted";
}

TEST(ReproducibleRefusalTest,
     RefusesHooksAndGradientsThatCannotBeSummedInOrder) {
  run_ranks(2, [](const Group& group) {
    const bool is_odd = group->getRank() == 1;  // only this rank is wrong
    EXPECT_THAT(refusal_of(group, {.comm_hook = is_odd ? all_reduce_hook(group)
                                                       : nullptr,
                                   .reproducible = true}),
                HasSubstr("expected no comm hook"));
    EXPECT_THAT(refusal_of(group, {.expect_sparse_gradients = {false, is_odd},
                                   .reproducible = true}),
                HasSubstr("parameter 1 has a sparse gradient"));
    EXPECT_THAT(refusal_of(group, {.reproducible = is_odd}),
                HasSubstr("option reproducible differs"));
  });
}

TEST(ReproducibleRefusalTest, RefusesAnotherHookLater) {
  const Group group = single_process_group();
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, group, {.reproducible = true});
  EXPECT_THROW(reducer.set_comm_hook(nullptr), c10::ValueError);
  EXPECT_THROW(reducer.set_comm_hook(all_reduce_hook(group)), c10::ValueError);
  reducer.set_comm_hook(ordered_hook(group));
  expect_trains(reducer, model, 0, 1);
  EXPECT_THROW(ordered_hook(nullptr), c10::ValueError);
}

}  // namespace reproducible_test
}  // namespace brigade
