#include "brigade/hooks/autograd_hooks.h"

#include <torch/torch.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "brigade/tests/support/undefined_gradient.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace autograd_hooks_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::Undefined;

at::Tensor parameter() { return torch::ones({2}, at::requires_grad()); }

class Listener final {
 public:
  explicit Listener(std::vector<at::Tensor> parameters)
      : parameters_(std::move(parameters)) {}

  void operator()(VariableIndex variable, bool is_defined) {
    const size_t i = variable.parameter;
    EXPECT_EQ(parameters_[i].grad().defined(), is_defined);
    ready.push_back(i);
    if (i == throws_on) throw std::domain_error("listener");
  }

  std::vector<size_t> ready;
  size_t throws_on = 99;

 private:
  std::vector<at::Tensor> parameters_;
};

TEST(GradientHooksTest, CallsTheListenerAfterAccumulation) {
  const std::vector<at::Tensor> parameters = {parameter(), parameter()};
  Listener listener(parameters);
  GradientHooks hooks(std::array{parameters}, std::ref(listener));
  (parameters[0] * parameters[1]).sum().backward();
  EXPECT_THAT(listener.ready, ::testing::UnorderedElementsAre(0, 1));
}

TEST(GradientHooksTest, ReportsAnUndefinedGradient) {
  const std::vector<at::Tensor> parameters = {parameter(), parameter()};
  Listener listener(parameters);
  GradientHooks hooks(std::array{parameters}, std::ref(listener));
  (Undefined::apply(parameters[0]) + parameters[1]).sum().backward();
  EXPECT_THAT(listener.ready, ::testing::UnorderedElementsAre(0, 1));
  EXPECT_FALSE(parameters[0].grad().defined());
}

TEST(GradientHooksTest, ReportsTheReplica) {
  const std::vector<std::vector<at::Tensor>> replicas = {
      {parameter(), parameter()}, {parameter(), parameter()}};
  struct Replicas {
    void operator()(VariableIndex variable, bool) { ready.push_back(variable); }
    std::vector<VariableIndex> ready;
  } listener;
  GradientHooks hooks(replicas, std::ref(listener));
  replicas[1][0].sum().backward();
  EXPECT_THAT(listener.ready,
              ElementsAre(VariableIndex{.replica = 1, .parameter = 0}));
  EXPECT_EQ(hooks.accumulators()[2],
            torch::autograd::impl::grad_accumulator(replicas[1][0]).get());
}

TEST(GradientHooksTest, PropagatesExceptionsWithTheirType) {
  const std::vector<at::Tensor> parameters = {parameter()};
  Listener listener(parameters);
  listener.throws_on = 0;
  GradientHooks hooks(std::array{parameters}, std::ref(listener));
  EXPECT_THROW(parameters[0].sum().backward(), std::domain_error);
}

// ---- Sinks.

at::Tensor leaf(const std::vector<double>& values,
                at::ScalarType dtype = at::kFloat) {
  return torch::tensor(values).to(dtype).requires_grad_();
}

// Copies taken gradients, and records the order of calls.
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

TEST_F(GradientSinkTest, TakesBeforeTheListenerAndGradStaysUndefined) {
  (parameters_[0] * 5).sum().backward();
  (parameters_[1] * 7).sum().backward();
  expect_taken({{5, 5}, {7, 7}});
  EXPECT_THAT(recorder_.events,
              ElementsAre("take 0", "ready 0", "take 1", "ready 1"));
  EXPECT_FALSE(parameters_[0].grad().defined());
  EXPECT_FALSE(parameters_[1].grad().defined());
}

TEST_F(GradientSinkTest, KeepsAnExistingGrad) {
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

TEST_F(GradientSinkTest, TensorHooksRunBeforeAndPostAccumulateHooksAfter) {
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

TEST_F(GradientSinkTest, GradientsOfAutogradGradAreNotTaken) {
  const auto gradients =
      torch::autograd::grad({(parameters_[0] * 5).sum()}, {parameters_[0]});
  EXPECT_TRUE(at::equal(gradients.at(0), torch::full({2}, 5.0)));
  EXPECT_THAT(recorder_.events, IsEmpty());
}

TEST_F(GradientSinkTest, ASinksExceptionPropagatesBeforeTheListener) {
  recorder_.throws = true;
  EXPECT_THROW(parameters_[0].sum().backward(), std::domain_error);
  EXPECT_THAT(recorder_.events, ElementsAre("take 0"));
  recorder_.throws = false;
  (parameters_[0] * 5).sum().backward();
  expect_taken({{5, 5}});
}

TEST_F(GradientSinkTest, AfterRemovalALiveGraphAccumulatesIntoGrad) {
  const at::Tensor loss = (parameters_[0] * 5).sum();
  hooks_.reset();
  loss.backward();
  EXPECT_THAT(recorder_.events, IsEmpty());
  EXPECT_TRUE(at::equal(parameters_[0].grad(), torch::full({2}, 5.0)));
}

TEST_F(GradientSinkTest, RemovalKeepsOtherSinks) {
  Recorder other;
  const std::unique_ptr<GradientHooks> others = hooks_for(other);
  hooks_.reset();
  (parameters_[0] * 5).sum().backward();
  EXPECT_THAT(recorder_.events, IsEmpty());
  EXPECT_THAT(other.events, ElementsAre("take 0", "ready 0"));
  EXPECT_FALSE(parameters_[0].grad().defined());
}

// Only autograd owns the gradient.
TEST_F(GradientSinkTest, AGradientIsFreedBeforeTheListenerIsCalled) {
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

// ---- The end of a backward.

class BackwardEndTest : public ::testing::Test {
 protected:
  // Returns a loss whose backward calls `in_backward`.
  at::Tensor loss(std::function<void()> in_backward) {
    at::Tensor middle = weight_ * 2;
    middle.register_hook([in_backward](const at::Tensor&) { in_backward(); });
    return middle.sum();
  }

  void watch(std::weak_ptr<void> owner) {
    watch_backward_end(
        owner, [this] { events_.push_back("end"); },
        [this] { events_.push_back("abandoned"); });
  }

  at::Tensor weight_ = parameter();
  std::shared_ptr<int> owner_ = std::make_shared<int>(0);
  std::vector<std::string> events_;
};

TEST_F(BackwardEndTest, CallsOnEndAfterAllGradients) {
  loss([&] {
    watch(owner_);
    EXPECT_FALSE(weight_.grad().defined());
  }).backward();
  EXPECT_TRUE(weight_.grad().defined());
  EXPECT_THAT(events_, ElementsAre("end"));
}

TEST_F(BackwardEndTest, CallsOnAbandonedIfBackwardThrows) {
  EXPECT_THROW(loss([&] {
                 watch(owner_);
                 throw std::domain_error("in backward");
               }).backward(),
               std::domain_error);
  EXPECT_THAT(events_, ElementsAre("abandoned"));
}

TEST_F(BackwardEndTest, CallsNothingAfterItsOwnerHasExpired) {
  loss([&] {
    watch(owner_);
    owner_.reset();
  }).backward();
  EXPECT_THAT(events_, IsEmpty());
}

TEST_F(BackwardEndTest, PropagatesExceptionsOfOnEnd) {
  at::Tensor throwing = loss([&] {
    watch_backward_end(
        owner_, [] { throw std::domain_error("at the end"); }, [] {});
  });
  EXPECT_THROW(throwing.backward(), std::domain_error);
}

TEST_F(BackwardEndTest, GivesEachBackwardAnotherId) {
  EXPECT_EQ(running_backward_id(), -1);
  int first = -1;
  int second = -1;
  loss([&] { first = running_backward_id(); }).backward();
  loss([&] { second = running_backward_id(); }).backward();
  EXPECT_GE(first, 0);
  EXPECT_NE(first, second);
}

TEST(OutputWatchTest, CallsWhenABackwardReachesAnOutput) {
  at::Tensor weight = parameter();
  at::Tensor output = weight * 2;
  auto owner = std::make_shared<int>(0);
  int times = 0;
  watch_outputs(std::vector<at::Tensor>{output, weight, at::Tensor()}, owner,
                [&] { ++times; });
  output.sum().backward();
  EXPECT_EQ(times, 1);
  weight.sum().backward();  // a leaf is not watched
  EXPECT_EQ(times, 1);
  owner.reset();
  (output * 3).sum().backward();
  EXPECT_EQ(times, 1);
}

}  // namespace autograd_hooks_test
}  // namespace brigade
