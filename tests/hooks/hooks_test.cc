#include <torch/torch.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "brigade/hooks/autograd_hooks.h"
#include "brigade/tests/support/undefined_gradient.h"
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

}  // namespace hooks_test
}  // namespace brigade
