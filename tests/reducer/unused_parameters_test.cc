#include <torch/torch.h>

#include <array>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace unused_parameters_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::run_ranks;
using testing::step;
using testing::text_of;
using testing::ToyModel;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Order = std::vector<size_t>;

const ToyModel::Sizes kSizes = {{3, 2}, {5}, {2, 2, 2}, {7}};

ReducerOptions finding_unused() { return {.find_unused_parameters = true}; }

bool contains(const Order& order, size_t parameter) {
  return std::find(order.begin(), order.end(), parameter) != order.end();
}

// The average over ranks; `uses[rank]` lists the parameters that the rank used.
at::Tensor average(const ToyModel& model, size_t parameter,
                   const std::vector<Order>& uses, int step) {
  at::Tensor sum = at::zeros_like(model.parameters[parameter]);
  for (size_t rank = 0; rank < uses.size(); ++rank) {
    if (contains(uses[rank], parameter)) {
      sum = sum + model.gradient(parameter, static_cast<int>(rank), step);
    }
  }
  return (sum / static_cast<int64_t>(uses.size())).detach();
}

bool used_anywhere(size_t parameter, const std::vector<Order>& uses) {
  for (const Order& order : uses) {
    if (contains(order, parameter)) return true;
  }
  return false;
}

void expect_averages(const ToyModel& model, const std::vector<Order>& uses,
                     int step) {
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    const at::Tensor& gradient = model.parameters[i].grad();
    if (!used_anywhere(i, uses)) {
      EXPECT_FALSE(gradient.defined()) << "parameter " << i;
      continue;
    }
    ASSERT_TRUE(gradient.defined()) << "parameter " << i << " step " << step;
    EXPECT_TRUE(at::equal(gradient, average(model, i, uses, step)))
        << "parameter " << i << " step " << step;
  }
}

// World size x gradients as views x bucket cap in bytes x skipping.
class UnusedOnRanksTest
    : public ::testing::TestWithParam<std::tuple<int, bool, int64_t, bool>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  ReducerOptions options() const {
    return {.bucket_cap_bytes = {std::get<2>(GetParam())},
            .find_unused_parameters = true,
            .skip_all_reduce_unused_parameters = std::get<3>(GetParam()),
            .gradient_as_bucket_view = std::get<1>(GetParam())};
  }
};

TEST_P(UnusedOnRanksTest, ContributesZerosForUnusedParameters) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    const std::vector<Order> by_rank = {{0, 1, 2, 3}, {1, 3}, {2}, {3, 2}};
    const std::vector<Order> uses(by_rank.begin(),
                                  by_rank.begin() + world_size());
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      step(reducer,
           model.loss_in_order(uses[group->getRank()], group->getRank(), s));
      expect_averages(model, uses, s);
    }
  });
}

TEST_P(UnusedOnRanksTest, SupportsRandomControlFlow) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    std::mt19937 random(42);  // the same on all ranks
    for (int s = 0; s < 12; ++s) {
      std::vector<Order> uses(world_size());
      for (Order& order : uses) {
        for (size_t i = 0; i < kSizes.size(); ++i) {
          if (s % 4 == 3 || random() % 2 == 0) order.push_back(i);
        }
        std::shuffle(order.begin(), order.end(), random);
        if (order.empty()) order.push_back(random() % kSizes.size());
      }
      model.zero_grad();
      step(reducer,
           model.loss_in_order(uses[group->getRank()], group->getRank(), s));
      expect_averages(model, uses, s);
    }
    EXPECT_EQ(reducer.statistics().reduced, 12);
    EXPECT_FALSE(reducer.is_graph_static());
  });
}

TEST_P(UnusedOnRanksTest, KeepsGloballyUnusedGradients) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    const int rank = group->getRank();
    step(reducer, model.loss(rank));
    // Multiples of 1/3 would change bits if they were averaged again.
    for (const at::Tensor& p : model.parameters) p.mutable_grad().div_(3);
    std::vector<at::Tensor> before;
    for (const at::Tensor& p : model.parameters) {
      before.push_back(p.grad().clone());
    }
    const at::Tensor gradient = model.parameters[2].grad();
    step(reducer, model.loss_in_order({0, 3}, rank));
    EXPECT_TRUE(at::equal(model.parameters[1].grad(), before[1]));
    EXPECT_TRUE(at::equal(model.parameters[2].grad(), before[2]));
    EXPECT_TRUE(model.parameters[2].grad().is_same(gradient));
    EXPECT_FALSE(at::equal(model.parameters[0].grad(), before[0]));
  });
}

TEST_P(UnusedOnRanksTest, AccumulatesMarksOfUnreducedBackwards) {
  run_ranks(world_size(), [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    const int rank = group->getRank();
    for (int s = 0; s < 3; ++s) {
      model.zero_grad(/*set_to_none=*/s != 1);
      model.loss_in_order({1, 2}, rank, s).backward();
      step(reducer, model.loss_in_order({2, 3}, rank, s + 1));
      const at::Tensor expected[] = {model.average(1, world_size(), s),
                                     model.average(2, world_size(), s) +
                                         model.average(2, world_size(), s + 1),
                                     model.average(3, world_size(), s + 1)};
      for (size_t i = 1; i < 4; ++i) {
        EXPECT_TRUE(at::equal(model.parameters[i].grad(), expected[i - 1]));
      }
      EXPECT_FALSE(model.parameters[0].grad().defined());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnusedOnRanksTest,
                         ::testing::Values(std::tuple(1, false, 1, false),
                                           std::tuple(1, true, 40, true),
                                           std::tuple(1, false, 1 << 20, true),
                                           std::tuple(2, true, 1, true),
                                           std::tuple(2, false, 40, false),
                                           std::tuple(2, true, 1 << 20, false),
                                           std::tuple(3, false, 1, true),
                                           std::tuple(3, true, 40, false),
                                           std::tuple(3, true, 1 << 20, true)));

TEST(UnusedParametersTest, BecomeReadyInBackwardNotInPrepare) {
  const ToyModel model({{2}, {3}});
  RecordingGroup recording(2);
  ReducerOptions options = finding_unused();
  options.bucket_plan = {{1}, {0}};
  Reducer reducer(model.parameters, recording.group(), options);
  const size_t before = recording.log().size();
  reducer.prepare_for_backward(model.loss_in_order({0}, 0));
  EXPECT_EQ(recording.log().size(), before);  // this output is ignored
  step(reducer, model.loss_in_order({0, 1}, 0));
  EXPECT_TRUE(
      at::equal(model.parameters[1].grad(), model.gradient(1, 0).detach()));
}

TEST(UnusedParametersTest, MayBeAllParametersOfARank) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(model.parameters, group, finding_unused());
    const std::vector<Order> uses = {{0}, {}};
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      const at::Tensor other = torch::ones({}, at::requires_grad());
      step(reducer,
           model.loss_in_order(uses[group->getRank()], group->getRank(), s) +
               other);
      expect_averages(model, uses, s);
    }
  });
}

TEST(UnusedParametersTest, BitmapIsReducedOnceAfterTheBuckets) {
  const ToyModel model({{2}, {3}});
  RecordingGroup recording(2);
  ReducerOptions options = finding_unused();
  options.bucket_plan = {{1}, {0}};
  Reducer reducer(model.parameters, recording.group(), options);
  const size_t before = recording.log().size();
  step(reducer, model.loss_in_order({0}, 0));
  const std::vector<RecordedCollective> log = recording.log();
  ASSERT_EQ(log.size(), before + 3);
  EXPECT_EQ(log[before + 2].dtype, at::kInt);
  EXPECT_EQ(log[before + 2].numel, 2);
}

TEST(UnusedParametersTest, BucketsThatNoRankUsedCanBeSkipped) {
  const ToyModel model({{2}, {3}, {4}});
  RecordingGroup recording(2);
  ReducerOptions options = finding_unused();
  options.skip_all_reduce_unused_parameters = true;
  options.bucket_plan = {{2}, {1}, {0}};
  Reducer reducer(model.parameters, recording.group(), options);
  step(reducer, model.loss_in_order({0, 2}, 0));
  step(reducer, model.loss_in_order({0, 1, 2}, 0));
  EXPECT_EQ(reducer.statistics().buckets_launched, 5);
  EXPECT_EQ(reducer.statistics().buckets_skipped, 1);
}

TEST(UnusedParametersTest, LaunchPositionIgnoresEarlierIterations) {
  std::vector<size_t> launched_before;
  for (const int num_full_iterations : {0, 3}) {
    const ToyModel model({{2}, {3}, {4}});
    RecordingGroup recording(2);
    ReducerOptions options = finding_unused();
    options.bucket_plan = {{1}, {2}, {0}};
    Reducer reducer(model.parameters, recording.group(), options);
    for (int s = 0; s < num_full_iterations; ++s) {
      step(reducer, model.loss(0, s));
    }
    const size_t before = recording.log().size();
    size_t launched = 0;
    model.parameters[0].register_hook(
        [&](const at::Tensor&) { launched = recording.log().size() - before; });
    step(reducer, model.loss_in_order({2, 0}, 0));
    launched_before.push_back(launched);
  }
  EXPECT_THAT(launched_before, ElementsAre(2, 2));  // {1}, unused, and {2}
}

TEST(UnusedParametersTest, ErrorNamesGradientOfAnEarlierForward) {
  const ToyModel model({{2}, {3}});
  RecordingGroup recording(2);
  ReducerOptions options = finding_unused();
  options.parameter_names = model.names;
  Reducer reducer(model.parameters, recording.group(), options);
  const at::Tensor first = model.loss_in_order({0}, 0);
  const at::Tensor second = model.loss_in_order({1}, 0);
  reducer.prepare_for_backward(first);
  reducer.prepare_for_backward(second);
  const std::string text =
      text_of<c10::Error>([&] { (first + second).backward(); });
  EXPECT_THAT(text, HasSubstr("backward reached parameter 0 ('p0') in "
                              "iteration 1 on rank 0, which the outputs of the "
                              "last forward do not depend on"));
  EXPECT_THAT(text, HasSubstr("all but the last under no_sync()"));
  EXPECT_THAT(text, HasSubstr("mark a variable ready only once. Parameter at "
                              "index 0 with name p0"));
  model.zero_grad();
  step(reducer, model.loss(0));
  EXPECT_EQ(reducer.missing_gradients().size(), 0u);
}

// Writes the parameter's `.grad` itself, as fused kernels do.
class WritesGradient : public torch::autograd::Function<WritesGradient> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& parameter,
                            const at::Tensor& gradient) {
    context->save_for_backward({parameter, gradient});
    return (parameter.detach() * gradient).sum();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& parameter = saved[0];
    if (parameter.grad().defined()) {
      parameter.mutable_grad().add_(saved[1]);
    } else {
      parameter.mutable_grad() = saved[1].detach().clone();
    }
    return {at::Tensor(), at::Tensor()};
  }
};

TEST(UnusedParametersTest, ExcludeThoseWhoseFunctionWritesGrad) {
  for (const bool is_static : {false, true}) {
    for (const bool as_views : {false, true}) {
      run_ranks(2, [&](const Group& group) {
        const ToyModel model(kSizes);
        Reducer reducer(model.parameters, group,
                        {.find_unused_parameters = !is_static,
                         .static_graph = is_static,
                         .gradient_as_bucket_view = as_views});
        const int rank = group->getRank();
        for (int s = 0; s < 4; ++s) {
          model.zero_grad();
          step(reducer, model.loss_in_order({1, 2, 3}, rank, s) +
                            WritesGradient::apply(model.parameters[0],
                                                  model.gradient(0, rank, s)));
          expect_averages(model, {{0, 1, 2, 3}, {0, 1, 2, 3}}, s);
        }
      });
    }
  }
}

TEST(UnusedParametersTest, ShowWhetherTheGraphIsStatic) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group(), finding_unused());
  for (int s = 0; s < 3; ++s) step(reducer, model.loss_in_order({1}, 0));
  EXPECT_TRUE(reducer.is_graph_static());
  step(reducer, model.loss(0));
  EXPECT_FALSE(reducer.is_graph_static());
}

TEST(UnusedParametersTest, DoNotRebuildBuckets) {
  const ToyModel model({{2}, {3}});
  Reducer reducer(model.parameters, single_process_group(), finding_unused());
  for (int s = 0; s < 3; ++s) step(reducer, model.loss_in_order({0, 1}, 0));
  EXPECT_EQ(reducer.statistics().rebuilds, 0);
}

TEST(UnusedParametersTest, GradOfInputsOnlyReducesNothing) {
  for (const bool is_static : {false, true}) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(
        model.parameters, single_process_group(),
        {.find_unused_parameters = true, .static_graph = is_static});
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      const at::Tensor x = torch::ones({}, at::requires_grad());
      const at::Tensor loss = model.loss_in_order({0}, 0) * x;
      reducer.prepare_for_backward(loss);
      torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true);
      EXPECT_EQ(reducer.statistics().reduced, s);
      loss.backward();
      EXPECT_EQ(reducer.statistics().reduced, s + 1);
      EXPECT_TRUE(
          at::equal(model.parameters[0].grad(), model.gradient(0, 0).detach()));
    }
  }
}

TEST(UnusedParametersTest, MayBeSparse) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor table = at::ones({4, 2}).requires_grad_();
    const at::Tensor weight = at::ones({2}).requires_grad_();
    ReducerOptions options = finding_unused();
    options.expect_sparse_gradients = {true, false};
    Reducer reducer({table, weight}, group, options);
    const auto loss = [&](bool uses_table) {
      const at::Tensor rows =
          uses_table ? torch::embedding(table, at::tensor({group->getRank()}),
                                        -1, false, /*sparse=*/true)
                     : at::ones({1, 2});
      return (rows * weight).sum();
    };
    step(reducer, loss(false));
    EXPECT_FALSE(table.grad().defined());
    step(reducer, loss(group->getRank() == 1));
    ASSERT_TRUE(table.grad().defined());
    EXPECT_TRUE(at::equal(table.grad().to_dense()[1], at::full({2}, 0.5)));
    EXPECT_TRUE(at::equal(table.grad().to_dense()[0], at::zeros({2})));
  });
}

TEST(UnusedParametersTest, ErrorNamesParametersOutsideTheLoss) {
  const ToyModel model({{2}, {3}});
  ReducerOptions options = finding_unused();
  options.parameter_names = model.names;
  Reducer reducer(model.parameters, single_process_group(), options);
  const at::Tensor used = model.loss_in_order({0}, 0);
  const at::Tensor ignored = model.loss_in_order({1}, 0);
  reducer.prepare_for_backward(std::vector<at::Tensor>{used, ignored});
  used.backward();
  EXPECT_THAT(text_of<c10::Error>([&] { reducer.prepare_for_backward(used); }),
              AllOf(HasSubstr("1 of 2 parameters got no gradient in iteration "
                              "1 on rank 0: parameter 1 ('p1')"),
                    HasSubstr("the loss does not")));
  step(reducer, model.loss(0));  // goes on
}

// Multiplies by 1; its backward returns an undefined gradient unless `passes`.
class Passes : public torch::autograd::Function<Passes> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x, bool passes) {
    context->saved_data["passes"] = passes;
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const bool passes = context->saved_data["passes"].toBool();
    return {passes ? gradients[0] : at::Tensor(), at::Tensor()};
  }
};

class UndefinedGradientsTest : public ::testing::TestWithParam<bool> {
 protected:
  ReducerOptions options() const {
    return {.bucket_cap_bytes = {1},
            .find_unused_parameters = true,
            .gradient_as_bucket_view = GetParam()};
  }
};

TEST_P(UndefinedGradientsTest, CountAsUnused) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    const int rank = group->getRank();
    // Ranks with defined gradients, by step: none, both, one, none, ...
    for (int s = 0; s < 8; ++s) {
      const bool defined[2] = {s % 4 == 1, s % 4 == 1 || s % 4 == 2};
      const std::vector<Order> uses = {
          defined[0] ? Order{0, 1, 2, 3} : Order{1, 3},
          defined[1] ? Order{0, 1, 2, 3} : Order{1, 3}};
      model.zero_grad();
      step(reducer, model.loss_in_order({1, 3}, rank, s) +
                        Passes::apply(model.loss_in_order({0, 2}, rank, s),
                                      defined[rank]));
      expect_averages(model, uses, s);
    }
    EXPECT_EQ(reducer.statistics().reduced, 8);
  });
}

TEST_P(UndefinedGradientsTest, AreReadyOnce) {
  const ToyModel model({{2}, {3}});
  RecordingGroup recording(2);
  Reducer reducer(model.parameters, recording.group(), options());
  const at::Tensor undefined =
      Passes::apply(model.loss_in_order({0}, 0), /*passes=*/false);
  const at::Tensor loss = model.loss(0);
  reducer.prepare_for_backward(std::vector<at::Tensor>{undefined, loss});
  undefined.backward();
  EXPECT_THAT(text_of<c10::Error>([&] { loss.backward(); }),
              HasSubstr("parameter 0 became ready twice"));
}

// An existing gradient looks like one that the function wrote itself.
TEST_P(UndefinedGradientsTest, AverageAnExistingGradient) {
  run_ranks(2, [&](const Group& group) {
    const ToyModel model(kSizes);
    Reducer reducer(model.parameters, group, options());
    const int rank = group->getRank();
    step(reducer, model.loss(rank));
    model.parameters[2].mutable_grad().fill_(4 * rank);
    step(reducer, model.loss_in_order({0, 1, 3}, rank) +
                      Passes::apply(model.loss_in_order({2}, rank), false));
    EXPECT_TRUE(at::equal(model.parameters[2].grad(), at::full({2, 2, 2}, 2)));
    EXPECT_TRUE(at::equal(model.parameters[0].grad(), 2 * model.average(0, 2)));
  });
}

INSTANTIATE_TEST_SUITE_P(Views, UndefinedGradientsTest, ::testing::Bool());

TEST(UnusedParametersTest, UsesAreCountedOverRanks) {
  run_ranks(3, [](const Group& group) {
    const ToyModel model({{2}, {3}, {4}});
    Reducer reducer(model.parameters, group, finding_unused());
    const auto counts = [&] {
      const at::Tensor map = reducer.used_parameter_counts();
      return std::vector<int32_t>(map.data_ptr<int32_t>(),
                                  map.data_ptr<int32_t>() + map.numel());
    };
    EXPECT_THAT(counts(), ElementsAre(0, 0, 0));
    const int rank = group->getRank();
    step(reducer, model.loss_in_order(rank == 1 ? Order{0, 2} : Order{2}, 0));
    EXPECT_THAT(counts(), ElementsAre(1, 0, 3));
    EXPECT_THAT(counts(), ElementsAre(1, 0, 3));
    step(reducer, model.loss(rank));
    EXPECT_THAT(counts(), ElementsAre(3, 3, 3));
  });
}

TEST(UnusedParametersTest, UsesAreNotCountedByDefault) {
  const ToyModel model(ToyModel::Sizes{{2}});
  Reducer reducer(model.parameters, single_process_group());
  EXPECT_FALSE(reducer.used_parameter_counts().defined());
}

}  // namespace unused_parameters_test
}  // namespace brigade
