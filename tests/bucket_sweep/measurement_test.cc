#include <torch/torch.h>

#include <limits>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "brigade/bucket_sweep/sweep.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Two weights of 0.5 MiB and integer gradients.
torch::nn::Sequential make_net() {
  torch::nn::Sequential net(
      torch::nn::Linear(torch::nn::LinearOptions(512, 256).bias(false)),
      torch::nn::Linear(torch::nn::LinearOptions(256, 512).bias(false)));
  for (at::Tensor& parameter : net->parameters()) {
    const at::NoGradGuard no_grad;
    parameter.fill_(2);
  }
  return net;
}

at::Tensor loss_of(torch::nn::Sequential& net, int rank) {
  return (net->forward(torch::ones({4, 512})).sum() * (rank + 1));
}

TEST(SweepTest, TimesEachPlanOnceAndKeepsTheParameters) {
  std::mutex mutex;
  std::vector<SweepSamples> found;
  ::brigade::testing::run_ranks(2, [&](const Group& group) {
    torch::nn::Sequential net = make_net();
    const auto loss = [&] { return loss_of(net, group->getRank()); };
    const SweepSamples samples = measure(
        net->parameters(), loss, group,
        {.sizes = {"each", "0.001", "100", "one"}, .rounds = 2, .steps = 2});
    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
      EXPECT_TRUE(at::equal(parameter, at::full_like(parameter, 2)));
    }
    // The sweep leaves no hooks on the parameters.
    loss().backward();
    EXPECT_TRUE(at::equal(net->parameters()[1].grad(),
                          at::full({512, 256}, (group->getRank() + 1) * 4096)));
    const std::lock_guard lock(mutex);
    found.push_back(samples);
  });
  ASSERT_EQ(found.size(), 2U);
  const SweepSamples& samples = found[0];
  const std::vector<ParameterSpec>& specs = samples.model.backward.parameters;
  EXPECT_EQ(specs.size(), 2U);
  EXPECT_EQ(specs[0].size_bytes + specs[1].size_bytes, 1 << 20);
  ASSERT_EQ(samples.plans.size(), 2U);
  // default, 100, one; each, 0.001. The planned one equals either.
  EXPECT_EQ(samples.plans[0].arms.size() + samples.plans[1].arms.size(), 6U);
  EXPECT_EQ(samples.model.backward.order, (std::vector<size_t>{1, 0}));
  EXPECT_EQ(samples.model.backward.ready_s, found[1].model.backward.ready_s);
  EXPECT_TRUE(check_backward(samples.model.backward).ok());
  EXPECT_GT(samples.model.cost.seconds(1 << 20), 0);
  EXPECT_EQ(samples.plans[0].arms[1].label, "100 MiB");
  EXPECT_THAT(samples.plans[0].buckets, ElementsAre(SizeIs(2)));
  EXPECT_THAT(samples.plans[1].buckets, ElementsAre(SizeIs(1), SizeIs(1)));
  EXPECT_EQ(samples.local_ms.size(), 2U);
  for (size_t i = 0; i < samples.plans.size(); ++i) {
    const PlanSamples& plan = samples.plans[i];
    ASSERT_EQ(plan.rounds_ms.size(), 2U);
    EXPECT_EQ(plan.rounds_ms[0].size(), 2U);
    EXPECT_EQ(plan.alone_ms.size(), 2U);
    // Ranks agree on the slowest rank's times.
    EXPECT_EQ(plan.rounds_ms, found[1].plans[i].rounds_ms);
  }
  EXPECT_EQ(samples.local_ms, found[1].local_ms);
}

TEST(SweepTest, OneCallReturnsASummaryForToText) {
  ::brigade::testing::run_ranks(2, [](const Group& group) {
    torch::nn::Sequential net = make_net();
    const auto sweep_with = [&](const SweepOptions& options) {
      return sweep(
          net->parameters(), [&] { return loss_of(net, group->getRank()); },
          group, options);
    };
    const std::string text = to_text(
        "Net", sweep_with({.sizes = {"each"}, .rounds = 1, .steps = 1}));
    EXPECT_THAT(text, HasSubstr("Net: 2 parameters, 1.00 MiB\nstep without"));
    EXPECT_THAT(text, ::testing::ContainsRegex("\neach.* 2 0.50 MiB"));
    EXPECT_THAT(text, HasSubstr("recommended: "));
    EXPECT_THROW(sweep_with({.rounds = 0}), c10::ValueError);
  });
}

TEST(SweepTest, AnInterruptedSweepContinuesWithTheSameModelAndSizes) {
  ::brigade::testing::run_ranks(2, [](const Group& group) {
    torch::nn::Sequential net = make_net();
    const auto measure_with = [&](const SweepOptions& options) {
      return measure(
          net->parameters(), [&] { return loss_of(net, group->getRank()); },
          group, options);
    };
    SweepOptions options = {.sizes = {"each", "one"}, .rounds = 2, .steps = 1};
    std::shared_ptr<SweepSamples> begun;
    options.after_round = [&](const SweepSamples& samples) {
      begun = std::make_shared<SweepSamples>(samples);
      throw std::runtime_error("interrupted");
    };
    EXPECT_THROW(measure_with(options), std::runtime_error);
    ASSERT_EQ(begun->local_ms.size(), 1U);
    options.after_round = {};
    options.resumed = begun;
    const SweepSamples whole = measure_with(options);
    ASSERT_EQ(whole.local_ms.size(), 2U);
    EXPECT_EQ(whole.local_ms[0], begun->local_ms[0]);
    EXPECT_EQ(whole.plans[0].rounds_ms[0], begun->plans[0].rounds_ms[0]);
    EXPECT_EQ(whole.plans[0].timeline.size(), 1U);
    options.sizes = {"one"};
    EXPECT_THROW(measure_with(options), c10::ValueError);
  });
}

using Caps = std::vector<int64_t>;

TEST(BucketArmTest, NamesAndSizesBecomeCaps) {
  EXPECT_EQ(default_arm().caps_bytes, (Caps{1 << 20, 25 << 20}));
  EXPECT_EQ(arm_of("each").caps_bytes, Caps{1});
  EXPECT_EQ(arm_of("one").caps_bytes,
            Caps{std::numeric_limits<int64_t>::max()});
  EXPECT_EQ(arm_of("0.25").caps_bytes, Caps{1 << 18});
  EXPECT_EQ(arm_of("0.25").label, "0.25 MiB");
  EXPECT_EQ(arm_of("100").label, "100 MiB");
}

TEST(BucketArmTest, OtherTextsAreErrors) {
  for (const char* const cap : {"x", "-1", "0", "nan", "", "1e9", "1 MiB"}) {
    EXPECT_THROW(arm_of(cap), c10::ValueError) << cap;
  }
}

}  // namespace
}  // namespace brigade
