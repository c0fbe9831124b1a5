#include "brigade/bucket_sweep/summary.h"

#include "brigade/tests/bucket_sweep/samples.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::samples_of;

std::vector<double> times(size_t count, double ms) {
  return std::vector<double>(count, ms);
}

TEST(SummaryTest, AFairCoinHasItsChances) {
  EXPECT_EQ(chance_of(0, 3), 1);
  EXPECT_EQ(chance_of(3, 3), 1.0 / 8);
  EXPECT_EQ(chance_of(2, 3), 4.0 / 8);
}

TEST(SummaryTest, DifferencesAreTakenWithinARound) {
  SweepSamples samples = samples_of({20, 120}, {15, 110});
  samples.local_ms = {{10, 12, 14}, {100, 101, 102}};
  const SweepSummary summary = summarize(samples);
  EXPECT_EQ(summary.local_ms.median, 57);
  EXPECT_EQ(summary.arms[0].exposed_ms.median, (8 + 19) / 2.0);
  EXPECT_EQ(summary.arms[1].exposed_ms.median, (3 + 9) / 2.0);
  EXPECT_EQ(summary.arms[1].overlap(), 1 - 6.0 / 8);
  ASSERT_TRUE(summary.best);
  EXPECT_EQ(summary.best->saved_ms.p25, 6.25);
  EXPECT_EQ(summary.best->saved_ms.median, 7.5);
  EXPECT_EQ(summary.best->saved_ms.p75, 8.75);
}

TEST(SummaryTest, ASizeThatIsFasterInEveryRoundIsChosen) {
  const auto best = summarize(samples_of(times(8, 20), times(8, 18))).best;
  ASSERT_TRUE(best);
  EXPECT_EQ(best->arm, 1U);
  EXPECT_TRUE(best->decided);
  EXPECT_EQ(best->rounds_faster, 8);
  EXPECT_EQ(best->saved_share, 0.1);
}

TEST(SummaryTest, ASizeThatChanceMayHaveMadeFasterIsNotDecided) {
  std::vector<double> other = times(8, 18);
  other[0] = other[5] = 21;
  const auto best = summarize(samples_of(times(8, 20), other)).best;
  ASSERT_TRUE(best);
  EXPECT_EQ(best->saved_ms.median, 2);
  EXPECT_FALSE(best->decided);
}

TEST(SummaryTest, TheMoreSizesAreTriedTheLessChanceIsAllowed) {
  SweepSamples samples = samples_of(times(5, 20), times(5, 18));
  EXPECT_TRUE(summarize(samples).best->decided);  // 1/32
  const SweepTrack again = samples.tracks[1];
  samples.tracks.push_back(again);
  EXPECT_FALSE(summarize(samples).best->decided);  // 2/32
}

TEST(SummaryTest, WithoutAnotherPlanNothingIsRecommended) {
  SweepSamples samples = samples_of({20}, {18});
  samples.tracks.pop_back();
  EXPECT_FALSE(summarize(samples).best);
}

}  // namespace
}  // namespace brigade
