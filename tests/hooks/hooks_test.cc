#include <torch/torch.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "brigade/hooks/backward_end.h"
#include "brigade/hooks/gradient_hooks.h"
#include "brigade/hooks/output_hooks.h"
#include "brigade/tests/hooks/undefined_gradient.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace hooks_test {

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

TEST(GradientHooksTest, TellsOfEachGradientAfterItIsAccumulated) {
  const std::vector<at::Tensor> parameters = {parameter(), parameter()};
  Listener listener(parameters);
  GradientHooks hooks(std::array{parameters}, std::ref(listener));
  (parameters[0] * parameters[1]).sum().backward();
  EXPECT_THAT(listener.ready, ::testing::UnorderedElementsAre(0, 1));
}

TEST(GradientHooksTest, TellsThatAGradientIsUndefined) {
  const std::vector<at::Tensor> parameters = {parameter(), parameter()};
  Listener listener(parameters);  // compares with `.grad`
  GradientHooks hooks(std::array{parameters}, std::ref(listener));
  (Undefined::apply(parameters[0]) + parameters[1]).sum().backward();
  EXPECT_THAT(listener.ready, ::testing::UnorderedElementsAre(0, 1));
  EXPECT_FALSE(parameters[0].grad().defined());
}

TEST(GradientHooksTest, TellsOfWhichReplica) {
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

TEST(GradientHooksTest, PassesExceptionsOutOfBackwardWithTheirType) {
  const std::vector<at::Tensor> parameters = {parameter()};
  Listener listener(parameters);
  listener.throws_on = 0;
  GradientHooks hooks(std::array{parameters}, std::ref(listener));
  EXPECT_THROW(parameters[0].sum().backward(), std::domain_error);
}

class BackwardEndTest : public ::testing::Test {
 protected:
  // A loss whose backward runs `in_backward` in its middle.
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

TEST_F(BackwardEndTest, TellsOfTheEndAfterAllGradients) {
  loss([&] {
    watch(owner_);
    EXPECT_FALSE(weight_.grad().defined());
  }).backward();
  EXPECT_TRUE(weight_.grad().defined());
  EXPECT_THAT(events_, ElementsAre("end"));
}

TEST_F(BackwardEndTest, TellsOfABackwardThatThrows) {
  EXPECT_THROW(loss([&] {
                 watch(owner_);
                 throw std::domain_error("in backward");
               }).backward(),
               std::domain_error);
  EXPECT_THAT(events_, ElementsAre("abandoned"));
}

TEST_F(BackwardEndTest, KeepsSilentWhenItsOwnerIsGone) {
  loss([&] {
    watch(owner_);
    owner_.reset();
  }).backward();
  EXPECT_THAT(events_, IsEmpty());
}

TEST_F(BackwardEndTest, LetsTheEndThrowOutOfBackward) {
  at::Tensor throwing = loss([&] {
    watch_backward_end(
        owner_, [] { throw std::domain_error("at the end"); }, [] {});
  });
  EXPECT_THROW(throwing.backward(), std::domain_error);
}

TEST_F(BackwardEndTest, NumbersBackwards) {
  EXPECT_EQ(running_backward_id(), -1);
  int first = -1;
  int second = -1;
  loss([&] { first = running_backward_id(); }).backward();
  loss([&] { second = running_backward_id(); }).backward();
  EXPECT_GE(first, 0);
  EXPECT_NE(first, second);
}

TEST(OutputWatchTest, TellsWhenABackwardReachesAnOutput) {
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

TEST(OutputTieTest, ABackwardFromOneOutputGoesThroughAll) {
  const std::vector<at::Tensor> parameters = {parameter(), parameter()};
  Listener listener(parameters);  // compares with `.grad`
  GradientHooks hooks(std::array{parameters}, std::ref(listener));
  const std::vector<at::Tensor> outputs =
      tie_outputs(std::array{parameters[0] * 2, parameters[1] * 3});
  outputs[1].sum().backward();
  EXPECT_THAT(listener.ready, ::testing::UnorderedElementsAre(0, 1));
  EXPECT_FALSE(parameters[0].grad().defined());
  EXPECT_TRUE(at::equal(parameters[1].grad(), at::full({2}, 3.0)));
}

TEST(OutputTieTest, ValuesAndDerivativesAreThoseOfTheOutputs) {
  for (const bool copies : {true, false}) {
    const at::Tensor x = at::tensor({2.0f, 3.0f}).requires_grad_();
    const at::Tensor y = at::tensor({5.0f, 7.0f}).requires_grad_();
    const std::array outputs = {x * x * y, y * y * y};
    const std::vector<at::Tensor> tied = tie_outputs(outputs, copies);
    ASSERT_EQ(tied.size(), 2);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::equal(tied[i], outputs[i]));
      EXPECT_EQ(tied[i].is_alias_of(outputs[i]), !copies);
    }
    const at::Tensor gradient =
        torch::autograd::grad({tied[0].sum() + tied[1].sum()}, {y}, {}, true,
                              /*create_graph=*/true)[0];
    EXPECT_TRUE(at::equal(gradient, x * x + 3 * y * y));
    gradient.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), 2 * x));
    EXPECT_TRUE(at::equal(y.grad(), 6 * y));
  }
}

TEST(OutputTieTest, CopiesMayBeChangedInPlace) {
  const at::Tensor x = parameter();
  const at::Tensor whole = x * 2;
  std::vector<at::Tensor> tied = tie_outputs(std::array{whole, whole[0]});
  tied[1].mul_(5);
  (tied[0].sum() + tied[1]).backward();
  EXPECT_TRUE(at::equal(tied[0], at::full({2}, 2.0)));
  EXPECT_TRUE(at::equal(x.grad(), at::tensor({12.0f, 2.0f})));
}

TEST(OutputTieTest, TensorsWithoutHistoryAreLeftAlone) {
  const at::Tensor leaf = parameter();
  const at::Tensor constant = torch::ones({2});
  const at::Tensor one = leaf * 2;
  const at::Tensor other = leaf * 3;
  const std::vector<at::Tensor> alone =
      tie_outputs(std::array{leaf, one, constant, at::Tensor()});
  EXPECT_TRUE(alone[1].is_same(one));
  const std::vector<at::Tensor> tied =
      tie_outputs(std::array{leaf, one, constant, at::Tensor(), other});
  EXPECT_TRUE(tied[0].is_same(leaf));
  EXPECT_TRUE(tied[2].is_same(constant));
  EXPECT_FALSE(tied[3].defined());
  EXPECT_EQ(tied[1].grad_fn(), tied[4].grad_fn());
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(tie_outputs(std::array{one, other})[0].is_same(one));
}

}  // namespace hooks_test
}  // namespace brigade
