#include "brigade/planning/launch_order.h"

#include <algorithm>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class LaunchOrderTest : public ::testing::Test {
 protected:
  void plan(std::vector<std::vector<size_t>> buckets) {
    size_t n = 0;
    for (const auto& bucket : buckets) n += bucket.size();
    plan_.emplace(*BucketPlan::create(std::move(buckets), n));
    order_.emplace(*plan_);
  }

  // The buckets that may be launched after this gradient.
  std::vector<size_t> ready(size_t parameter) {
    order_->mark_ready({.parameter = parameter});
    std::vector<size_t> launched;
    while (auto bucket = order_->take_next()) launched.push_back(*bucket);
    return launched;
  }

  std::optional<BucketPlan> plan_;
  std::optional<LaunchOrder> order_;
};

TEST_F(LaunchOrderTest, HoldsLaterBucketUntilEarlierIsFull) {
  plan({{0, 1}, {2}});
  EXPECT_THAT(ready(2), IsEmpty());
  EXPECT_THAT(ready(0), IsEmpty());
  EXPECT_THAT(ready(1), ElementsAre(0, 1));
  EXPECT_TRUE(order_->all_launched());
}

TEST_F(LaunchOrderTest, TellsWhichGradientFillsABucket) {
  plan({{0, 1}, {2}});
  EXPECT_FALSE(order_->mark_ready({.parameter = 1}));
  EXPECT_TRUE(order_->mark_ready({.parameter = 0}));
}

TEST_F(LaunchOrderTest, RemembersWhatIsMissing) {
  plan({{0, 1}, {2, 3}});
  ready(3);
  ready(0);
  EXPECT_THAT(order_->missing(), ElementsAre(1, 2));
  EXPECT_TRUE(order_->is_ready({.parameter = 3}));
  EXPECT_FALSE(order_->is_ready({.parameter = 1}));
}

TEST_F(LaunchOrderTest, WaitsForTheGradientsOfAllReplicas) {
  plan({{0, 1}, {2}});
  LaunchOrder order(*plan_, /*num_replicas=*/2);
  for (size_t parameter : {0, 1, 2}) {
    EXPECT_FALSE(order.mark_ready({.replica = 1, .parameter = parameter}));
  }
  EXPECT_FALSE(order.mark_ready({.replica = 0, .parameter = 1}));
  EXPECT_FALSE(order.is_ready({.replica = 0, .parameter = 0}));
  EXPECT_TRUE(order.is_ready({.replica = 1, .parameter = 0}));
  EXPECT_THAT(order.missing(), ElementsAre(0, 2));
  EXPECT_TRUE(order.mark_ready({.replica = 0, .parameter = 0}));
  EXPECT_EQ(order.take_next(), 0);
  EXPECT_EQ(order.take_next(), std::nullopt);
}

// Every order of ready gradients for several small plans: what is launched is
// always a prefix of the plan, each bucket once, and as long as possible.
TEST_F(LaunchOrderTest, LaunchesTheLongestFullPrefixInEveryInterleaving) {
  const std::vector<std::vector<std::vector<size_t>>> plans = {
      {{0, 1, 2, 3, 4}},
      {{0}, {1}, {2}, {3}, {4}},
      {{4, 3}, {2}, {1, 0}},
      {{2}, {0, 4, 1}, {3}}};
  for (const auto& buckets : plans) {
    std::vector<size_t> permutation = {0, 1, 2, 3, 4};
    do {
      plan(buckets);
      std::vector<size_t> launched;
      std::vector<bool> is_ready(5, false);
      for (size_t parameter : permutation) {
        for (size_t bucket : ready(parameter)) launched.push_back(bucket);
        is_ready[parameter] = true;
        size_t full_prefix = 0;
        while (full_prefix < buckets.size() &&
               std::all_of(buckets[full_prefix].begin(),
                           buckets[full_prefix].end(),
                           [&](size_t p) { return is_ready[p]; })) {
          ++full_prefix;
        }
        ASSERT_EQ(launched.size(), full_prefix);
        for (size_t b = 0; b < launched.size(); ++b) ASSERT_EQ(launched[b], b);
      }
      EXPECT_TRUE(order_->all_launched());
      EXPECT_THAT(order_->missing(), IsEmpty());
    } while (std::next_permutation(permutation.begin(), permutation.end()));
  }
}

}  // namespace
}  // namespace brigade
