#include "brigade/examples/digits/reference.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::digits {
namespace {

constexpr TrainingOptions kOneStep = {.epochs = 1, .batch_size = 4};

DigitImages some_images(int64_t count) {
  return {.pixels = at::arange(count * 64, at::kFloat)
                        .remainder(17)
                        .div(16)
                        .view({count, 1, 8, 8}),
          .labels = at::arange(count, at::kLong).remainder(kNumClasses)};
}

std::vector<at::Tensor> gradients_of_first_weights(const DigitImages& images) {
  torch::manual_seed(kOneStep.seed);
  DigitsNet net;
  torch::nn::functional::cross_entropy(net->forward(images.pixels),
                                       images.labels)
      .backward();
  return gradients_of(net);
}

TEST(ReferenceTest, OneRankGivesTheGradientsOfTheBatch) {
  at::set_num_threads(1);
  const Batches batches(some_images(4), 4, 1, 1);
  const Reference reference =
      train_reference(batches, kOneStep, [](int64_t) {});
  EXPECT_TRUE(
      equal_bits(reference.first_gradients,
                 gradients_of_first_weights(batches.epoch(0).batch(0, 0))));
}

TEST(ReferenceTest, TwoRanksGiveTheHalvedSumOfTheirGradients) {
  at::set_num_threads(1);
  const Batches batches(some_images(4), 4, 2, 1);
  const Reference reference =
      train_reference(batches, kOneStep, [](int64_t) {});
  const Batches::Epoch epoch = batches.epoch(0);
  std::vector<at::Tensor> expected =
      gradients_of_first_weights(epoch.batch(0, 0));
  const std::vector<at::Tensor> second =
      gradients_of_first_weights(epoch.batch(0, 1));
  for (size_t i = 0; i < expected.size(); ++i) {
    expected[i] = expected[i] * 0.5F + second[i] * 0.5F;
  }
  EXPECT_TRUE(equal_bits(reference.first_gradients, expected));
}

TEST(ReferenceTest, TellsAboutEveryStep) {
  const Batches batches(some_images(20), 4, 2, 1);
  std::vector<int64_t> told;
  train_reference(batches, {.epochs = 2, .batch_size = 4},
                  [&](int64_t step) { told.push_back(step); });
  EXPECT_THAT(told, ::testing::ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
}

TEST(ReferenceTest, EqualBitsTellsZeroesApart) {
  const std::vector<at::Tensor> zero = {at::tensor({0.0F})};
  const std::vector<at::Tensor> minus_zero = {at::tensor({-0.0F})};
  EXPECT_TRUE(equal_bits(zero, {at::tensor({0.0F})}));
  EXPECT_FALSE(equal_bits(zero, minus_zero));
  EXPECT_FALSE(equal_bits(zero, {}));
}

TEST(ReferenceTest, DistanceIsInUnitsOfTheLargestElement) {
  constexpr float kUlpOfOne = std::numeric_limits<float>::epsilon();
  const std::vector<at::Tensor> expected = {at::tensor({1.0F, 0.25F}),
                                            at::tensor({8.0F})};
  const std::vector<at::Tensor> actual = {
      at::tensor({1.0F, 0.25F + 3 * kUlpOfOne}),
      at::tensor({8.0F + 8 * kUlpOfOne})};
  EXPECT_EQ(distance_in_ulp(actual, expected), 3);
  EXPECT_EQ(distance_in_ulp(expected, expected), 0);
}

TEST(ReferenceTest, NotANumberIsInfinitelyFar) {
  EXPECT_EQ(
      distance_in_ulp({at::tensor({std::nanf("")})}, {at::tensor({1.0F})}),
      std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace brigade::digits
