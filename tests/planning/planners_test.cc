#include "brigade/planning/planners.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

int draw(std::mt19937& random, int limit) {
  return static_cast<int>(random() % limit);
}

Backward random_backward(std::mt19937& random, int size, int num_kinds = 1) {
  Backward backward;
  double ready_s = 0;
  for (int i = 0; i < size; ++i) {
    backward.parameters.push_back(
        {.size_bytes = draw(random, 20),
         .kind = draw(random, num_kinds),
         .sparse = num_kinds > 1 && draw(random, 9) == 0});
    backward.order.push_back(i);
    ready_s += draw(random, 3) * 0.5;
    backward.ready_s.push_back(ready_s);
  }
  std::ranges::shuffle(backward.order, random);
  backward.end_s = ready_s + draw(random, 2);
  return backward;
}

// Linear, convex, concave and with jumps.
CollectiveCost random_cost(std::mt19937& random, int concurrency = 1) {
  std::vector<CostPiece> pieces;
  int64_t bytes = 0;
  double seconds = draw(random, 6);
  const int num_pieces = 1 + draw(random, 4);
  for (int i = 0; i < num_pieces; ++i) {
    const double slope = draw(random, 5) * 0.25;
    pieces.push_back({.from_bytes = bytes,
                      .latency_s = seconds - slope * static_cast<double>(bytes),
                      .s_per_byte = slope});
    const int length = 1 + draw(random, 30);
    bytes += length;
    seconds += slope * length + draw(random, 2) * draw(random, 4);
  }
  return *CollectiveCost::create(std::move(pieces), concurrency);
}

double end_of(const BucketPlan& plan, const Backward& backward,
              const CollectiveCost& cost) {
  const auto prediction = predict(plan, backward, cost);
  EXPECT_TRUE(prediction.ok()) << prediction.status();
  return prediction->end_s();
}

// The least end of all plans with contiguous buckets.
double least_end_of(const Backward& backward, const CollectiveCost& cost) {
  const size_t n = backward.order.size();
  double least = std::numeric_limits<double>::infinity();
  for (unsigned cuts = 0; cuts < 1U << (n - 1); ++cuts) {
    std::vector<std::vector<size_t>> buckets(1);
    for (size_t i = 0; i < n; ++i) {
      buckets.back().push_back(backward.order[i]);
      if (i + 1 < n && (cuts >> i & 1U) != 0) buckets.emplace_back();
    }
    least = std::min(least,
                     end_of(*BucketPlan::create(buckets, n), backward, cost));
  }
  return least;
}

TEST(PlannersTest, PredictsOneLink) {
  const Backward backward = {.parameters = {{10}, {10}, {20}},
                             .order = {2, 1, 0},
                             .ready_s = {1, 2, 3},
                             .end_s = 4};
  const auto cost = CollectiveCost::linear(1, 0.1);
  const auto plan = plan_each(backward);
  ASSERT_TRUE(plan.ok());
  const auto prediction = predict(*plan, backward, *cost);
  ASSERT_TRUE(prediction.ok());
  EXPECT_THAT(plan->buckets(),
              ElementsAre(ElementsAre(2), ElementsAre(1), ElementsAre(0)));
  EXPECT_DOUBLE_EQ(prediction->buckets[0].complete_s, 4);
  EXPECT_DOUBLE_EQ(prediction->buckets[1].launched_s, 2);
  EXPECT_DOUBLE_EQ(prediction->buckets[1].complete_s, 6);
  EXPECT_DOUBLE_EQ(prediction->end_s(), 8);
  EXPECT_DOUBLE_EQ(prediction->exposed_s(), 4);
}

TEST(PlannersTest, SimultaneousCollectivesShareTheLinkNotTheLatency) {
  const Backward backward = {.parameters = {{10}, {10}},
                             .order = {0, 1},
                             .ready_s = {0, 0},
                             .end_s = 0};
  const auto two = CollectiveCost::linear(1, 0.1, 2);
  EXPECT_DOUBLE_EQ(end_of(*plan_each(backward), backward, *two), 3);
  const auto one = CollectiveCost::linear(1, 0.1, 1);
  EXPECT_DOUBLE_EQ(end_of(*plan_each(backward), backward, *one), 4);
}

TEST(PlannersTest, BackwardAndCollectivesSlowEachOther) {
  Backward backward = {
      .parameters = {{10}, {10}},
      .order = {0, 1},
      .ready_s = {1, 2},
      .end_s = 2,
      .contention = {.backward_slowdown = 0.5, .collective_stretch = 2}};
  const auto cost = CollectiveCost::linear(0, 0.1);
  const auto each = predict(*plan_each(backward), backward, *cost);
  ASSERT_TRUE(each.ok()) << each.status();
  EXPECT_DOUBLE_EQ(each->buckets[0].launched_s, 1);
  EXPECT_DOUBLE_EQ(each->buckets[0].complete_s, 3);
  EXPECT_DOUBLE_EQ(each->backward_s, 3);
  EXPECT_DOUBLE_EQ(each->buckets[1].launched_s, 3);
  EXPECT_DOUBLE_EQ(each->buckets[1].complete_s, 4);
  // Nothing runs at once.
  EXPECT_DOUBLE_EQ(end_of(*plan_one(backward), backward, *cost), 4);
  // The collective of 5 s outlasts backward, which takes 2 s for its last one.
  const auto longer = CollectiveCost::linear(0, 0.5);
  const auto slow = predict(*plan_each(backward), backward, *longer);
  EXPECT_DOUBLE_EQ(slow->backward_s, 3);
  EXPECT_DOUBLE_EQ(slow->buckets[0].complete_s, 7);
  EXPECT_DOUBLE_EQ(slow->buckets[1].launched_s, 3);
  EXPECT_DOUBLE_EQ(slow->buckets[1].complete_s, 12);
  backward.contention.backward_slowdown = 1;
  EXPECT_THAT(std::string(check_backward(backward).message()),
              HasSubstr("a slowdown in [0, 1)"));
}

TEST(PlannersTest, NoCapIsBetterThanThePlanUnderContention) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 300; ++trial) {
    Backward backward = random_backward(random, 1 + draw(random, 9));
    backward.contention = {.backward_slowdown = 0.1 * draw(random, 9),
                           .collective_stretch = 1 + 0.5 * draw(random, 4)};
    const CollectiveCost cost = random_cost(random, 1 + draw(random, 2));
    const double end_s = end_of(*plan_for_cost(backward, cost), backward, cost);
    for (const auto& other :
         {plan_one(backward), plan_by_size(backward.parameters, backward.order,
                                           kDefaultBucketCapsBytes)}) {
      EXPECT_LE(end_s, end_of(*other, backward, cost) * (1 + 1e-9));
    }
    EXPECT_GE(end_s * (1 + 1e-12), earliest_end_s(backward, cost));
  }
}

TEST(PlannersTest, ThePlanIsOptimal) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    const int size = 1 + draw(random, trial % 50 == 0 ? 12 : 8);
    const Backward backward = random_backward(random, size);
    const CollectiveCost cost = random_cost(random);
    const auto plan = plan_for_cost(backward, cost);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const double end_s = end_of(*plan, backward, cost);
    const double least_s = least_end_of(backward, cost);
    ASSERT_LE(end_s, least_s * (1 + 1e-12)) << "trial " << trial;
    ASSERT_LE(earliest_end_s(backward, cost), least_s * (1 + 1e-12))
        << "trial " << trial;
    const auto fewer = plan_for_cost(backward, cost, 0.1);
    ASSERT_LE(end_of(*fewer, backward, cost), least_s * 1.1 * (1 + 1e-12));
  }
}

// Calls `visit` with each way to send parameters in launched buckets.
void visit_all_plans(size_t num_parameters,
                     std::vector<std::vector<size_t>>& buckets,
                     const std::function<void(const BucketPlan&)>& visit,
                     size_t next = 0) {
  if (next == num_parameters) {
    visit(*BucketPlan::create(buckets, num_parameters));
    return;
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    buckets[b].push_back(next);
    visit_all_plans(num_parameters, buckets, visit, next + 1);
    buckets[b].pop_back();
  }
  for (size_t b = 0; b <= buckets.size(); ++b) {
    buckets.insert(buckets.begin() + static_cast<std::ptrdiff_t>(b), {next});
    visit_all_plans(num_parameters, buckets, visit, next + 1);
    buckets.erase(buckets.begin() + static_cast<std::ptrdiff_t>(b));
  }
}

TEST(PlannersTest, TheBoundHoldsForBucketsOfAnyGradientsInAnyOrder) {
  std::mt19937 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const size_t size = 1 + trial % 5;
    const Backward backward = random_backward(random, static_cast<int>(size));
    const CollectiveCost linear =
        *CollectiveCost::linear(0.5 * draw(random, 5), 0.1 * draw(random, 5));
    const CollectiveCost table = random_cost(random, 1 + draw(random, 2));
    double least_s = std::numeric_limits<double>::infinity();
    std::vector<std::vector<size_t>> buckets;
    visit_all_plans(size, buckets, [&](const BucketPlan& plan) {
      least_s = std::min(least_s, end_of(plan, backward, linear));
      ASSERT_GE(end_of(plan, backward, table) * (1 + 1e-12),
                earliest_end_s(backward, table))
          << "trial " << trial;
    });
    ASSERT_NEAR(earliest_end_s(backward, linear), least_s, 1e-9)
        << "trial " << trial;
  }
}

TEST(PlannersTest, SlackBuysFewerBuckets) {
  // Any number of buckets ends at 40 s.
  const Backward backward = {
      .parameters = std::vector<ParameterSpec>(40, {.size_bytes = 1}),
      .order = reverse_registration_order(40),
      .ready_s = std::vector<double>(40, 0),
      .end_s = 0};
  const auto cost = CollectiveCost::linear(0, 1);
  EXPECT_EQ(plan_for_cost(backward, *cost, 0.003)->num_buckets(), 1U);
  EXPECT_FALSE(plan_for_cost(backward, *cost, -1).ok());
}

TEST(PlannersTest, SimultaneousCollectivesAndKindsAreNoWorseThanTheDefault) {
  std::mt19937 random(3);
  double sum = 0;
  double sum_of_least = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int num_kinds = 1 + trial % 3;
    const Backward backward =
        random_backward(random, 1 + draw(random, 9), num_kinds);
    const CollectiveCost cost = random_cost(random, 1 + draw(random, 3));
    const auto plan = plan_for_cost(backward, cost);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_TRUE(check_bucket_kinds(*plan, backward.parameters).ok());
    const double end_s = end_of(*plan, backward, cost);
    const auto by_size = plan_by_size(backward.parameters, backward.order,
                                      kDefaultBucketCapsBytes);
    EXPECT_LE(end_s, end_of(*by_size, backward, cost) * (1 + 1e-12));
    EXPECT_GE(end_s * (1 + 1e-12), earliest_end_s(backward, cost));
    if (num_kinds > 1) continue;
    sum += end_s;
    sum_of_least += least_end_of(backward, cost);
  }
  EXPECT_LT(sum, 1.005 * sum_of_least);
}

TEST(PlannersTest, MgWfbpMergesEverythingIfTheLatencyExceedsTheGaps) {
  Backward backward;
  for (size_t i = 0; i < 16; ++i) {
    backward.parameters.push_back({.size_bytes = 8});
    backward.order.push_back(i);
    backward.ready_s.push_back(static_cast<double>(i));
  }
  backward.end_s = 15;
  const auto cost = CollectiveCost::linear(1.5, 0.0625);
  const auto greedy = plan_by_mg_wfbp(backward, *cost);
  const auto plan = plan_for_cost(backward, *cost);
  ASSERT_TRUE(greedy.ok());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(greedy->num_buckets(), 1);
  EXPECT_EQ(end_of(*greedy, backward, *cost), 24.5);
  EXPECT_LT(end_of(*plan, backward, *cost), 18.5);
}

TEST(PlannersTest, OneAndEach) {
  const Backward backward = {
      .parameters = {{4, 0}, {4, 1}, {4, 0}, {.size_bytes = 4, .sparse = true}},
      .order = {3, 2, 1, 0},
      .ready_s = {0, 0, 1, 2},
      .end_s = 2};
  EXPECT_THAT(plan_each(backward)->buckets(),
              ElementsAre(ElementsAre(3), ElementsAre(2), ElementsAre(1),
                          ElementsAre(0)));
  EXPECT_THAT(plan_one(backward)->buckets(),
              ElementsAre(ElementsAre(3), ElementsAre(1), ElementsAre(2, 0)));
}

TEST(PlannersTest, RefusesBadInput) {
  const Backward good = {
      .parameters = {{4}, {4}}, .order = {1, 0}, .ready_s = {0, 1}, .end_s = 1};
  const auto error = [&](auto change) {
    Backward backward = good;
    change(backward);
    return std::string(check_backward(backward).message());
  };
  EXPECT_EQ(error([](Backward&) {}), "");
  EXPECT_THAT(error([](Backward& b) { b = {}; }), HasSubstr("found none"));
  EXPECT_THAT(error([](Backward& b) { b.order = {0}; }), HasSubstr("found 1"));
  EXPECT_THAT(error([](Backward& b) {
                b.order = {1, 1};
              }),
              HasSubstr("found 1 twice"));
  EXPECT_THAT(error([](Backward& b) {
                b.order = {1, 7};
              }),
              HasSubstr("found 7"));
  EXPECT_THAT(error([](Backward& b) { b.parameters[1].size_bytes = -1; }),
              HasSubstr("found -1 bytes of parameter 1"));
  EXPECT_THAT(error([](Backward& b) {
                b.ready_s = {2, 1};
              }),
              HasSubstr("found 1 s after 2 s"));
  EXPECT_THAT(error([](Backward& b) { b.ready_s[1] = std::nan(""); }),
              HasSubstr("finite"));
  EXPECT_THAT(error([](Backward& b) { b.end_s = 0; }),
              HasSubstr("after its last gradient at 1 s, found 0 s"));
  const auto cost = CollectiveCost::linear(1, 1);
  EXPECT_FALSE(predict(*BucketPlan::create({{0}}, 1), good, *cost).ok());
}

}  // namespace
}  // namespace brigade
