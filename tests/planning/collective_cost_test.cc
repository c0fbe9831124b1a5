#include "brigade/planning/collective_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;

std::string cost_error(const absl::StatusOr<CollectiveCost>& cost) {
  return std::string(cost.status().message());
}

double lower_bound_s(const CollectiveCost& cost, int64_t bytes) {
  double bound_s = 0;
  for (const CostPiece& line : cost.lines_below()) {
    bound_s = std::max(
        bound_s, line.latency_s + line.s_per_byte * static_cast<double>(bytes));
  }
  return bound_s;
}

TEST(CollectiveCostTest, ALinearCostIsLatencyPlusBytes) {
  const auto cost = CollectiveCost::linear(0.5, 0.25);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_EQ(cost->seconds(0), 0.5);
  EXPECT_EQ(cost->seconds(8), 2.5);
  EXPECT_EQ(lower_bound_s(*cost, 8), 2.5);
}

TEST(CollectiveCostTest, PointsAreInterpolatedAndContinued) {
  const std::vector<CostPoint> points = {{10, 1}, {20, 2}, {40, 8}};
  const auto cost = CollectiveCost::fit(points);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_DOUBLE_EQ(cost->seconds(0), 1);
  EXPECT_DOUBLE_EQ(cost->seconds(10), 1);
  EXPECT_DOUBLE_EQ(cost->seconds(15), 1.5);
  EXPECT_DOUBLE_EQ(cost->seconds(30), 5);
  EXPECT_DOUBLE_EQ(cost->seconds(50), 11);
}

TEST(CollectiveCostTest, DecreasingMeasurementsBecomeTheirMean) {
  const std::vector<CostPoint> points = {{1, 4}, {2, 2}, {4, 6}, {8, 5}};
  const auto cost = CollectiveCost::fit(points);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_DOUBLE_EQ(cost->seconds(1), 3);
  EXPECT_DOUBLE_EQ(cost->seconds(2), 3);
  EXPECT_DOUBLE_EQ(cost->seconds(4), 5.5);
  EXPECT_DOUBLE_EQ(cost->seconds(8), 5.5);
}

TEST(CollectiveCostTest, RefusesBadPieces) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(cost_error(CollectiveCost::create({})), HasSubstr("first piece"));
  EXPECT_THAT(cost_error(CollectiveCost::create({{1, 1, 1}})),
              HasSubstr("from 0 bytes on"));
  EXPECT_THAT(cost_error(CollectiveCost::linear(kNan, 1)), HasSubstr("finite"));
  EXPECT_THAT(cost_error(CollectiveCost::linear(-1, 1)), HasSubstr("-1 s"));
  EXPECT_THAT(cost_error(CollectiveCost::linear(1, -1)), HasSubstr("slopes"));
  EXPECT_THAT(cost_error(CollectiveCost::linear(1, 1, 0)),
              HasSubstr("concurrency >= 1, found 0"));
  EXPECT_THAT(cost_error(CollectiveCost::create({{0, 1, 1}, {0, 2, 1}})),
              HasSubstr("increasing sizes, found 0 after 0"));
  EXPECT_THAT(cost_error(CollectiveCost::create({{0, 9, 0}, {4, 1, 1}})),
              HasSubstr("found 5 s after 9 s at 4 bytes"));
}

TEST(CollectiveCostTest, RefusesBadPoints) {
  const auto error = [](std::vector<CostPoint> points) {
    return cost_error(CollectiveCost::fit(points));
  };
  EXPECT_THAT(error({{1, 1}}), HasSubstr("at least 2 points, found 1"));
  EXPECT_THAT(error({{2, 1}, {2, 1}}), HasSubstr("found 2 after 2"));
  EXPECT_THAT(error({{-1, 1}, {2, 1}}), HasSubstr("found -1 after 0"));
  EXPECT_THAT(error({{1, 1}, {2, std::nan("")}}), HasSubstr("for 2 bytes"));
}

// No way to send some bytes in several collectives costs less than the bound.
TEST(CollectiveCostTest, TheBoundHoldsForEveryDivision) {
  std::mt19937 random(1);
  const auto draw = [&](int limit) {
    return static_cast<int>(random() % limit);
  };
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<CostPoint> points;
    int64_t bytes = 0;
    double seconds = draw(5);
    for (int i = 0; i < 5; ++i) {
      points.push_back({bytes += 1 + draw(9), seconds});
      seconds += draw(12);
    }
    const auto cost = CollectiveCost::fit(points);
    ASSERT_TRUE(cost.ok()) << cost.status();
    // least[n]: the least time to send n bytes, in any number of collectives.
    std::vector<double> least = {cost->seconds(0)};
    for (int64_t n = 1; n <= 60; ++n) {
      least.push_back(cost->seconds(n));
      for (int64_t first = 1; first < n; ++first) {
        least[n] = std::min(least[n], cost->seconds(first) + least[n - first]);
      }
      EXPECT_LE(lower_bound_s(*cost, n), least[n] * (1 + 1e-12)) << n;
    }
  }
}

TEST(CollectiveCostTest, AFormulaIsSampled) {
  const auto cost = CollectiveCost::sample(
      [](int64_t bytes) { return 1e-5 + static_cast<double>(bytes) / 1e9; });
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_NEAR(cost->seconds(3 << 20), 1e-5 + (3 << 20) / 1e9, 1e-12);
}

}  // namespace
}  // namespace brigade
