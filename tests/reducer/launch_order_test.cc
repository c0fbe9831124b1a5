#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "brigade/reducer/iteration.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class LaunchOrderTest : public ::testing::Test {
 protected:
  // `entries`: the gradients that each entry waits for.
  void plan(const std::vector<std::vector<size_t>>& entries,
            size_t num_replicas = 1) {
    entry_of_.clear();
    std::vector<uint32_t> pending;
    for (size_t e = 0; e < entries.size(); ++e) {
      pending.push_back(
          static_cast<uint32_t>(num_replicas * entries[e].size()));
      for (const size_t gradient : entries[e]) {
        entry_of_.resize(std::max(entry_of_.size(), gradient + 1));
        entry_of_[gradient] = e;
      }
    }
    order_.emplace(std::move(pending));
  }

  bool mark_ready(size_t gradient) { return order_->mark(entry_of_[gradient]); }

  // Launches all ready entries, and returns them.
  std::vector<size_t> launch() {
    std::vector<size_t> launched;
    while (const auto entry = order_->next()) {
      launched.push_back(*entry);
      order_->launched();
    }
    return launched;
  }

  // Marks `gradient` as ready, launches, and returns the launched entries.
  std::vector<size_t> mark_and_launch(size_t gradient) {
    mark_ready(gradient);
    return launch();
  }

  std::vector<size_t> entry_of_;  // by gradient
  std::optional<LaunchOrder> order_;
};

TEST_F(LaunchOrderTest, WaitsForTheGradientsOfAllReplicas) {
  plan({{0, 1}, {2}}, /*num_replicas=*/2);
  for (const size_t gradient : {0, 1, 2}) EXPECT_FALSE(mark_ready(gradient));
  EXPECT_FALSE(mark_ready(1));
  EXPECT_TRUE(mark_ready(0));
  EXPECT_THAT(launch(), ElementsAre(0));
}

TEST_F(LaunchOrderTest, AnEntryWithoutGradientsIsLaunchedInItsTurn) {
  plan({{0}, {}, {1}, {}});
  EXPECT_THAT(launch(), IsEmpty());
  EXPECT_THAT(mark_and_launch(0), ElementsAre(0, 1));
  EXPECT_THAT(mark_and_launch(1), ElementsAre(2, 3));
  plan({{}, {0}});
  EXPECT_THAT(launch(), ElementsAre(0));
}

TEST_F(LaunchOrderTest, AnEntryIsTheNextOneUntilItHasBeenLaunched) {
  plan({{0}, {1}});
  mark_ready(0);
  EXPECT_EQ(order_->next(), 0);
  EXPECT_EQ(order_->next(), 0);
  EXPECT_FALSE(order_->is_launched(0));
  order_->launched();
  EXPECT_TRUE(order_->is_launched(0));
  EXPECT_FALSE(order_->is_launched(1));
  EXPECT_EQ(order_->next(), std::nullopt);
  EXPECT_FALSE(order_->all_launched());
}

TEST_F(LaunchOrderTest, AllMayBeReadyAtOnce) {
  plan({{0, 1}, {2}});
  mark_ready(1);
  order_->mark_all();
  EXPECT_THAT(launch(), ElementsAre(0, 1));
}

// For every order of ready gradients and several plans, the launched entries
// are the longest prefix of ready ones.
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
      for (size_t gradient : permutation) {
        for (size_t bucket : mark_and_launch(gradient))
          launched.push_back(bucket);
        is_ready[gradient] = true;
        size_t full_prefix = 0;
        while (full_prefix < buckets.size() &&
               std::all_of(buckets[full_prefix].begin(),
                           buckets[full_prefix].end(),
                           [&](size_t g) { return is_ready[g]; })) {
          ++full_prefix;
        }
        ASSERT_EQ(launched.size(), full_prefix);
        for (size_t b = 0; b < launched.size(); ++b) ASSERT_EQ(launched[b], b);
      }
      EXPECT_TRUE(order_->all_launched());
    } while (std::next_permutation(permutation.begin(), permutation.end()));
  }
}

}  // namespace
}  // namespace brigade
