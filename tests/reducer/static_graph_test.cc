#include <torch/torch.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "brigade/tests/support/undefined_gradient.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::step;
using testing::text_of;
using testing::ToyModel;
using testing::Undefined;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

ReducerOptions static_graph() { return {.static_graph = true}; }

// Loss whose backward runs the backwards of `parts` inside it, as reentrant
// checkpoints do.
class Reentrant : public torch::autograd::Function<Reentrant> {
 public:
  using Parts = std::vector<std::function<at::Tensor()>>;

  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& gate, const Parts* parts) {
    context->saved_data["parts"] = reinterpret_cast<int64_t>(parts);
    return gate.clone();
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto* parts =
        reinterpret_cast<const Parts*>(context->saved_data["parts"].toInt());
    for (const auto& part : *parts) {
      const at::AutoGradMode recording(true);
      part().backward();
    }
    return {gradients[0], at::Tensor()};
  }
};

at::Tensor reentrant(const Reentrant::Parts& parts) {
  return Reentrant::apply(torch::zeros({}, at::requires_grad()), &parts);
}

TEST(StaticGraphTest, ReducesGradientsThatComeInSeveralParts) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}, {4}});
    ReducerOptions options = static_graph();
    options.bucket_cap_bytes = {1};
    Reducer reducer(model.parameters, group, options);
    const int rank = group->getRank();
    for (int s = 0; s < 4; ++s) {
      model.zero_grad();
      const Reentrant::Parts parts = {
          [&] {
            return model.loss_in_order({1, 0}, rank, s);
          },
          [&] { return model.loss_in_order({1}, rank, s + 1); }};
      step(reducer, reentrant(parts) + model.loss_in_order({2}, rank, s));
      EXPECT_TRUE(
          at::equal(model.parameters[0].grad(), model.average(0, 2, s)));
      EXPECT_TRUE(
          at::equal(model.parameters[1].grad(),
                    model.average(1, 2, s) + model.average(1, 2, s + 1)));
      EXPECT_TRUE(
          at::equal(model.parameters[2].grad(), model.average(2, 2, s)));
      EXPECT_EQ(reducer.statistics().reduced, s + 1);
    }
    EXPECT_EQ(reducer.statistics().rebuilds, 1);
  });
}

TEST(StaticGraphTest, ReducesTheFirstIterationWhenItsBackwardEnds) {
  const ToyModel model({{2}, {3}});
  RecordingGroup recording(2);
  ReducerOptions options = static_graph();
  options.bucket_plan = {{1}, {0}};
  Reducer reducer(model.parameters, recording.group(), options);
  size_t before = recording.log().size();
  size_t during = 0;
  model.parameters[0].register_hook(
      [&](const at::Tensor&) { during = recording.log().size() - before; });
  step(reducer, model.loss(0));
  EXPECT_EQ(during, 0);
  EXPECT_EQ(recording.log().size() - before,
            3);  // two buckets and the used-parameter map
  before = recording.log().size();
  step(reducer, model.loss(0));
  EXPECT_EQ(during, 1);  // launched during backward
  EXPECT_EQ(recording.log().size() - before, 2);
}

TEST(StaticGraphTest, PlansFromTheOrderInWhichGradientsWereComplete) {
  const ToyModel model({{2}, {3}, {4}});
  ReducerOptions options = static_graph();
  options.bucket_cap_bytes = {1};
  Reducer reducer(model.parameters, single_process_group(), options);
  const Reentrant::Parts parts = {[&] {
                                    return model.loss_in_order({1, 0}, 0);
                                  },
                                  [&] {
                                    return model.loss_in_order({2, 1}, 0);
                                  }};
  for (int s = 0; s < 3; ++s) step(reducer, reentrant(parts));
  EXPECT_THAT(reducer.plan().buckets(),
              ElementsAre(ElementsAre(0), ElementsAre(2), ElementsAre(1)));
}

TEST(StaticGraphTest, KeepsGradientsThatAreNeverUsed) {
  run_ranks(3, [](const Group& group) {
    const ToyModel model({{2}, {3}, {4}});
    Reducer reducer(model.parameters, group, static_graph());
    const int rank = group->getRank();
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      step(reducer, rank == 0 ? model.loss_in_order({0, 1}, rank, s)
                              : model.loss_in_order({0}, rank, s));
      EXPECT_FALSE(model.parameters[2].grad().defined());
      EXPECT_TRUE(
          at::equal(model.parameters[0].grad(), model.average(0, 3, s)));
      EXPECT_TRUE(at::equal(model.parameters[1].grad(),
                            (model.gradient(1, 0, s) / 3).detach()));
    }
  });
}

TEST(StaticGraphTest, AParameterUsedForTheFirstTimeLaterIsNamed) {
  const ToyModel model({{2}, {3}});
  ReducerOptions options = static_graph();
  options.parameter_names = model.names;
  Reducer reducer(model.parameters, single_process_group(), options);
  step(reducer, model.loss_in_order({0}, 0));
  EXPECT_THAT(text_of<c10::Error>([&] {
                step(reducer, model.loss_in_order({0, 1}, 0));
              }),
              HasSubstr("parameter 1 ('p1') was reached by backward in "
                        "iteration 2 on rank 0, but not in the first"));
  model.zero_grad();
  step(reducer, model.loss_in_order({0}, 0));  // goes on
  EXPECT_TRUE(
      at::equal(model.parameters[0].grad(), model.gradient(0, 0).detach()));
}

TEST(StaticGraphTest, AParameterThatIsMissingLaterIsNamed) {
  const ToyModel model({{2}, {3}});
  ReducerOptions options = static_graph();
  options.parameter_names = model.names;
  Reducer reducer(model.parameters, single_process_group(), options);
  step(reducer, model.loss(0));
  step(reducer, model.loss_in_order({0}, 0));
  EXPECT_THAT(
      text_of<c10::Error>([&] { reducer.prepare_for_backward(model.loss(0)); }),
      AllOf(HasSubstr("iteration 2 on rank 0: parameter 1 ('p1')"),
            HasSubstr("static_graph")));
}
TEST(StaticGraphTest, AFirstBackwardMayReachNoParameter) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(model.parameters, group, static_graph());
    const int rank = group->getRank();
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      const at::Tensor input = torch::ones({}, at::requires_grad());
      step(reducer,
           rank == 0 ? input * 2 : input * model.loss_in_order({1}, rank, s));
      EXPECT_FALSE(model.parameters[0].grad().defined());
      EXPECT_TRUE(at::equal(model.parameters[1].grad(),
                            model.gradient(1, 1, s).detach() / 2));
      EXPECT_EQ(reducer.statistics().reduced, s + 1);
    }
  });
}

TEST(StaticGraphTest, AFirstBackwardWithoutParametersOnAnyRankIsReducedToo) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}});
    Reducer reducer(model.parameters, group, static_graph());
    for (int s = 0; s < 3; ++s) {
      step(reducer, torch::ones({}, at::requires_grad()) * 2);
      EXPECT_EQ(reducer.statistics().reduced, s + 1);
      EXPECT_FALSE(model.parameters[0].grad().defined());
    }
  });
}

TEST(StaticGraphTest, UndefinedGradientsCountAsUnused) {
  run_ranks(2, [](const Group& group) {
    const ToyModel model({{2}, {3}, {4}});
    Reducer reducer(model.parameters, group, static_graph());
    const int rank = group->getRank();
    for (int s = 0; s < 3; ++s) {
      model.zero_grad();
      const at::Tensor second = model.loss_in_order({1}, rank, s);
      step(reducer, model.loss_in_order({0}, rank, s) +
                        (rank == 0 ? Undefined::apply(second) : second) +
                        Undefined::apply(model.loss_in_order({2}, rank, s)));
      EXPECT_TRUE(
          at::equal(model.parameters[0].grad(), model.average(0, 2, s)));
      EXPECT_TRUE(at::equal(model.parameters[1].grad(),
                            model.gradient(1, 1, s).detach() / 2));
      EXPECT_FALSE(model.parameters[2].grad().defined());
    }
  });
}
}  // namespace
}  // namespace brigade
