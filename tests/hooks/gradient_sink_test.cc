// Hooks with a sink, which takes gradients in place of `.grad`.

#include <torch/torch.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "brigade/hooks/autograd_hooks.h"
#include "brigade/tests/support/undefined_gradient.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::Undefined;

at::Tensor leaf(const std::vector<double>& values,
                at::ScalarType dtype = at::kFloat) {
  return torch::tensor(values).to(dtype).requires_grad_();
}

// Keeps copies of what is taken, and notes who is told what in which order.
class Recorder final {
 public:
  void take(VariableIndex variable, const at::Tensor& gradient) {
    events.push_back("take " + std::to_string(variable.parameter));
    if (throws) throw std::domain_error("sink");
    has_history = gradient.requires_grad();
    taken.push_back(gradient.detach().clone());
  }

  void operator()(VariableIndex variable, bool is_defined) {
    events.push_back((is_defined ? "ready " : "undefined ") +
                     std::to_string(variable.parameter));
  }

  std::vector<std::string> events;
  std::vector<at::Tensor> taken;
  bool has_history = false;
  bool throws = false;
};

template <typename Taker>
GradientHooks::Sink sink_of(Taker& taker) {
  return [&taker](VariableIndex variable, const at::Tensor& gradient) {
    taker.take(variable, gradient);
  };
}

class PostAccumulateHook final
    : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit PostAccumulateHook(std::function<void(const at::Tensor&)> function)
      : function_(std::move(function)) {}
  void operator()(const at::Tensor& tensor) override { function_(tensor); }

 private:
  std::function<void(const at::Tensor&)> function_;
};

class GradientSinkTest : public ::testing::Test {
 protected:
  std::unique_ptr<GradientHooks> hooks_for(Recorder& recorder) const {
    return std::make_unique<GradientHooks>(
        std::array{parameters_}, std::ref(recorder), sink_of(recorder));
  }

  void expect_taken(const std::vector<std::vector<double>>& expected) const {
    ASSERT_EQ(recorder_.taken.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(recorder_.taken[i].to(at::kDouble),
                            torch::tensor(expected[i], at::kDouble)))
          << recorder_.taken[i];
    }
  }

  const std::vector<at::Tensor> parameters_ = {leaf({1, 2}), leaf({3, 4})};
  Recorder recorder_;
  std::unique_ptr<GradientHooks> hooks_ = hooks_for(recorder_);
};

TEST_F(GradientSinkTest, TakesBeforeTheListenerHearsAndGradStaysUndefined) {
  (parameters_[0] * 5).sum().backward();
  (parameters_[1] * 7).sum().backward();
  expect_taken({{5, 5}, {7, 7}});
  EXPECT_THAT(recorder_.events,
              ElementsAre("take 0", "ready 0", "take 1", "ready 1"));
  EXPECT_FALSE(parameters_[0].grad().defined());
  EXPECT_FALSE(parameters_[1].grad().defined());
}

TEST_F(GradientSinkTest, LeavesAGradThatIsThereAsItIs) {
  const at::Tensor before = torch::full({2}, 9.0);
  parameters_[0].mutable_grad() = before;
  (parameters_[0] * 5).sum().backward();
  expect_taken({{5, 5}});
  EXPECT_TRUE(parameters_[0].grad().is_same(before));
  EXPECT_TRUE(at::equal(before, torch::full({2}, 9.0)));
}

TEST_F(GradientSinkTest, TakesTheSumOfAllUsesOnce) {
  (parameters_[0] * parameters_[0] + parameters_[0]).sum().backward();
  expect_taken({{3, 5}});
  EXPECT_THAT(recorder_.events, ElementsAre("take 0", "ready 0"));
}

TEST_F(GradientSinkTest, AnUndefinedGradientIsNotTaken) {
  parameters_[0].sum().backward();
  Undefined::apply(parameters_[0]).sum().backward();
  EXPECT_THAT(recorder_.events,
              ElementsAre("take 0", "ready 0", "undefined 0"));
}

TEST_F(GradientSinkTest, HooksOnTheTensorRunBeforeAndPostHooksBehind) {
  auto& events = recorder_.events;
  parameters_[0].register_hook([&](const at::Tensor& gradient) {
    events.push_back("tensor hook");
    return gradient * 10;
  });
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameters_[0],
      std::make_unique<PostAccumulateHook>([&](const at::Tensor& tensor) {
        events.push_back(tensor.grad().defined() ? "grad" : "no grad");
      }));
  (parameters_[0] * 5).sum().backward();
  expect_taken({{50, 50}});
  EXPECT_THAT(events,
              ElementsAre("tensor hook", "take 0", "no grad", "ready 0"));
}

TEST_F(GradientSinkTest, UnderCreateGraphAGradientHasAHistory) {
  const at::Tensor loss = (parameters_[0] * parameters_[0]).sum();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_FALSE(recorder_.has_history);
  loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_TRUE(recorder_.has_history);
}

TEST_F(GradientSinkTest, WhatAutogradGradReturnsIsNotTaken) {
  const auto gradients =
      torch::autograd::grad({(parameters_[0] * 5).sum()}, {parameters_[0]});
  EXPECT_TRUE(at::equal(gradients.at(0), torch::full({2}, 5.0)));
  EXPECT_THAT(recorder_.events, IsEmpty());
}

TEST_F(GradientSinkTest, WhatASinkThrowsComesOutAndTheListenerHearsNothing) {
  recorder_.throws = true;
  EXPECT_THROW(parameters_[0].sum().backward(), std::domain_error);
  EXPECT_THAT(recorder_.events, ElementsAre("take 0"));
  recorder_.throws = false;
  (parameters_[0] * 5).sum().backward();
  expect_taken({{5, 5}});
}

TEST_F(GradientSinkTest, OnceRemovedGradHoldsTheGradientsOfALiveGraph) {
  const at::Tensor loss = (parameters_[0] * 5).sum();
  hooks_.reset();
  loss.backward();
  EXPECT_THAT(recorder_.events, IsEmpty());
  EXPECT_TRUE(at::equal(parameters_[0].grad(), torch::full({2}, 5.0)));
}

TEST_F(GradientSinkTest, RemovalLeavesTheSinksOfOthers) {
  Recorder other;
  const std::unique_ptr<GradientHooks> others = hooks_for(other);
  hooks_.reset();
  (parameters_[0] * 5).sum().backward();
  EXPECT_THAT(recorder_.events, IsEmpty());
  EXPECT_THAT(other.events, ElementsAre("take 0", "ready 0"));
  EXPECT_FALSE(parameters_[0].grad().defined());
}

// Of a gradient that only autograd holds.
TEST_F(GradientSinkTest, AGradientIsFreedBeforeTheListenerHears) {
  struct Watch final {
    void take(VariableIndex, const at::Tensor& gradient) {
      weak.emplace_back(gradient.getIntrusivePtr());
    }
    void operator()(VariableIndex, bool) {
      is_freed.push_back(weak.back().expired());
    }
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> weak;
    std::vector<bool> is_freed;
  } watch;
  hooks_.reset();
  const GradientHooks hooks(std::array{parameters_}, std::ref(watch),
                            sink_of(watch));
  (parameters_[0] * 5).sum().backward();
  EXPECT_THAT(watch.is_freed, ElementsAre(true));
}

}  // namespace
}  // namespace brigade
