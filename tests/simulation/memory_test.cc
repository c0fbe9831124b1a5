#include "brigade/simulation/memory.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;

// A linear layer of 4 x 3 (12 weights, 3 biases) on 16 ranks: one element each;
// the last rank holds padding.
TEST(MemoryTest, PaddingIsLessThanOneElementPerRank) {
  const ModelLayer linear = {.tensors = {12, 3}};
  EXPECT_EQ(shard_elements(linear, 16), 1);
  EXPECT_EQ(16 * shard_elements(linear, 16) - linear.elements(), 1);
  EXPECT_EQ(shard_elements(linear, 16, /*by_tensor=*/true), 2);
  EXPECT_EQ(shard_elements({.tensors = {}}, 16), 0);
}

// An 8192 x 8192 matrix in bf16 on 1,024 ranks.
TEST(MemoryTest, ZeroSendsMessagesOf128KB) {
  EXPECT_EQ(2 * shard_elements({.tensors = {int64_t{1} << 26}}, 1024),
            128 * 1024);
}

TEST(MemoryTest, TheLargestUnitsAreUnsharded) {
  EXPECT_EQ(largest_sum({3, 9, 4}, 1), 9);
  EXPECT_EQ(largest_sum({3, 9, 4}, 2), 13);  // with prefetch
  EXPECT_EQ(largest_sum({3, 9, 4}, 10), 16);
  EXPECT_EQ(largest_sum({}, 1), 0);
}

ModelShape equal_layers(int count, double activation, double checkpoint) {
  return {.layers =
              std::vector<ModelLayer>(count, {.activation_bytes = activation,
                                              .checkpoint_bytes = checkpoint})};
}

TEST(MemoryTest, ABackwardRecomputesOneLayerAtATime) {
  const ModelShape model = equal_layers(3, 10, 1);
  const auto peak = [&](std::vector<char> checkpointed) {
    return peak_activation_bytes(model, 2, checkpointed);
  };
  EXPECT_EQ(peak({0, 0, 0}), 2 * 30);
  EXPECT_EQ(peak({1, 1, 1}), 2 * (3 + 10));
  EXPECT_EQ(peak({1, 1, 0}), 2 * (2 + 10));
  EXPECT_EQ(peak({0, 0, 1}), 2 * (21 + 10));
}

// All choices are tried.
TEST(MemoryTest, EqualLayersGetTheFewestCheckpointsThatFit) {
  const int n = 8;
  const ModelShape model = equal_layers(n, 10, 1);
  const std::vector<double> recompute_s(n, 1);
  for (double budget = 0; budget <= 90; ++budget) {
    int fewest = n + 1;
    double least = std::numeric_limits<double>::infinity();
    for (int choice = 0; choice < 1 << n; ++choice) {
      std::vector<char> checkpointed(n);
      for (int i = 0; i < n; ++i)
        checkpointed[i] = (choice >> i & 1) != 0 ? 1 : 0;
      const double peak = peak_activation_bytes(model, 1, checkpointed);
      least = std::min(least, peak);
      if (peak <= budget)
        fewest = std::min(fewest, std::popcount(static_cast<unsigned>(choice)));
    }
    double least_found = 0;
    const auto found =
        checkpoints_to_fit(model, 1, recompute_s, budget, &least_found);
    ASSERT_EQ(found.has_value(), fewest <= n) << budget;
    if (!found) {
      EXPECT_EQ(least_found, least);
      continue;
    }
    EXPECT_EQ(std::accumulate(found->begin(), found->end(), 0), fewest);
    EXPECT_LE(peak_activation_bytes(model, 1, *found), budget);
  }
}

TEST(MemoryTest, CheckpointsThatBecomeNeedlessAreDropped) {
  ModelShape model = equal_layers(3, 50, 1);
  model.layers[0].activation_bytes = 10;
  const std::vector<double> recompute_s = {0.1, 10, 20};
  double least = 0;
  EXPECT_THAT(*checkpoints_to_fit(model, 1, recompute_s, 70, &least),
              ElementsAre(0, 1, 0));
}

TEST(MemoryTest, CheckpointsOfUnequalLayersFit) {
  std::mt19937 random(2);
  const auto draw = [&](int limit) { return double(int(random() % limit)); };
  for (int trial = 0; trial < 500; ++trial) {
    ModelShape model;
    std::vector<double> recompute_s;
    for (int i = 0; i < 10; ++i) {
      model.layers.push_back(
          {.activation_bytes = draw(50), .checkpoint_bytes = draw(20)});
      recompute_s.push_back(draw(9));
    }
    const double budget = draw(300);
    double least = 0;
    const auto found =
        checkpoints_to_fit(model, 1, recompute_s, budget, &least);
    EXPECT_LE(found ? peak_activation_bytes(model, 1, *found) : 0, budget);
    EXPECT_TRUE(found || least > budget);
  }
}

TEST(MemoryTest, UnitsWithTheSlowestAllGathersPerByteStayUnsharded) {
  const std::vector<double> bytes = {10, 10, 0, 10, 5};
  const std::vector<double> gather_s = {1, 3, 9, 1, 4};
  EXPECT_THAT(units_to_keep(bytes, gather_s, 100), ElementsAre(1, 1, 0, 1, 1));
  EXPECT_THAT(units_to_keep(bytes, gather_s, 25), ElementsAre(0, 1, 0, 1, 1));
  EXPECT_THAT(units_to_keep(bytes, gather_s, 5), ElementsAre(0, 0, 0, 0, 1));
  EXPECT_THAT(units_to_keep(bytes, gather_s, -1), ElementsAre(0, 0, 0, 0, 0));
}

}  // namespace
}  // namespace brigade
