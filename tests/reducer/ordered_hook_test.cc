// Gradients that are summed in the order of the ranks, by a Reducer.

#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "brigade/comm_hooks/averaging_hook.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/step.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ordered_hook_test {

using testing::expect_trains;
using testing::run_ranks;
using testing::step;
using testing::ToyModel;
using testing::UserError;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const std::vector<int64_t> kSizes = {3, 1000, 1, 70, 20000};

// Of so many magnitudes that the order of additions shows.
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

class OrderedHookTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, OrderedHookTest,
                         ::testing::Values(1, 2, 3, 4));

// One that is rebuilt after the first step among them.
TEST_P(OrderedHookTest, BucketsDoNotShow) {
  const std::vector<std::vector<std::vector<size_t>>> plans = {
      {{4, 3, 2, 1, 0}}, {{4}, {3}, {2}, {1}, {0}}, {{0, 4}, {1, 3, 2}}, {}};
  run_ranks(GetParam(), [&](const Group& group) {
    const auto hook = ordered_hook(group);
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const auto& plan : plans) {
        std::vector<at::Tensor> parameters;
        for (const int64_t numel : kSizes) {
          parameters.push_back(at::zeros({numel}, dtype).requires_grad_());
        }
        ReducerOptions options = {.bucket_caps_bytes = {2048},
                                  .comm_hook = hook};
        if (!plan.empty()) options.bucket_plan = plan;
        Reducer reducer(parameters, group, options);
        for (int iteration = 0; iteration < 3; ++iteration) {
          at::Tensor loss = at::zeros({});
          for (size_t i = 0; i < parameters.size(); ++i) {
            parameters[i].mutable_grad().reset();
            loss =
                loss +
                (parameters[i] * gradient_of(i, group->getRank(), dtype)).sum();
          }
          step(reducer, loss);
          for (size_t i = 0; i < parameters.size(); ++i) {
            EXPECT_TRUE(at::equal(parameters[i].grad(),
                                  average_of(i, GetParam(), dtype)))
                << dtype << ", parameter " << i << ", iteration " << iteration;
          }
        }
      }
    }
  });
}

// What it has not launched, it launches on zeros, which meet the others'.
TEST_P(OrderedHookTest, ARankThatFailsInBackwardFailsAllAndAllTrainOn) {
  run_ranks(
      GetParam(),
      [&](const Group& group) {
        const int rank = group->getRank();
        const ToyModel model({{2}, {3}, {5}});
        Reducer reducer(
            model.parameters, group,
            {.bucket_plan = {{2}, {1}, {0}}, .comm_hook = ordered_hook(group)});
        expect_trains(reducer, model, rank, GetParam(), 1);
        bool armed = rank == GetParam() - 1;
        model.parameters[1].register_hook([&](const at::Tensor&) {
          if (armed) throw UserError("the user's own");
        });
        EXPECT_ANY_THROW(step(reducer, model.loss(rank)));
        armed = false;
        expect_trains(reducer, model, rank, GetParam(), 2);
      },
      std::chrono::minutes(10));
}

TEST(OrderedHookFailureTest, ARankThatLeavesEndsItsPeersStep) {
  run_ranks(
      2,
      [](const Group& group) {
        const ToyModel model({{2}, {3}});
        std::optional<Reducer> reducer(
            std::in_place, model.parameters, group,
            ReducerOptions{.bucket_plan = {{1}, {0}},
                           .comm_hook = ordered_hook(group)});
        expect_trains(*reducer, model, group->getRank(), 2);
        if (group->getRank() == 1) {
          reducer.reset();
        } else {
          EXPECT_THROW(step(*reducer, model.loss(0)), c10::DistBackendError);
        }
      },
      std::chrono::minutes(10));
}

TEST(OrderedHookFailureTest, RefusesNoGroup) {
  EXPECT_THROW(ordered_hook(nullptr), c10::ValueError);
}

}  // namespace ordered_hook_test
}  // namespace brigade
