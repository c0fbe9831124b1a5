#include "brigade/fsdp/schedule/gather_schedule.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Units = std::vector<size_t>;

TEST(GatherScheduleTest, LaunchesAheadOfTheNeed) {
  GatherSchedule schedule(4, /*depth=*/1);
  EXPECT_THAT(schedule.begin({0, 1, 2, 3}), ElementsAre(0));
  EXPECT_EQ(schedule.needs(0), (GatherStep{.launch = {1}}));
  schedule.released(0);
  EXPECT_EQ(schedule.needs(1), (GatherStep{.launch = {2}}));
  schedule.released(1);
  EXPECT_EQ(schedule.needs(2), (GatherStep{.launch = {3}}));
  schedule.released(2);
  EXPECT_EQ(schedule.needs(3), (GatherStep{}));
  EXPECT_THAT(schedule.rest(), IsEmpty());
  EXPECT_THAT(schedule.unclaimed(), IsEmpty());
  EXPECT_THAT(schedule.record(), ElementsAre(0, 1, 2, 3));
}

TEST(GatherScheduleTest, LaunchesNothingAheadWithDepth0) {
  GatherSchedule schedule(2, /*depth=*/0);
  EXPECT_THAT(schedule.begin({0, 1}), IsEmpty());
  EXPECT_EQ(schedule.needs(0), (GatherStep{.launch = {0}}));
  EXPECT_EQ(schedule.needs(1), (GatherStep{.launch = {1}}));
  EXPECT_EQ(schedule.num_ahead(), 0u);
}

TEST(GatherScheduleTest, LaunchesWhatTheProgramLeavesOut) {
  GatherSchedule schedule(4, /*depth=*/0);
  schedule.begin({0, 1, 2, 3});
  EXPECT_EQ(schedule.needs(2), (GatherStep{.launch = {0, 1, 2}}));
  EXPECT_THAT(schedule.unclaimed(), ElementsAre(0, 1));
  EXPECT_EQ(schedule.needs(1), (GatherStep{})) << "it is there";
  EXPECT_THAT(schedule.rest(), ElementsAre(3));
  EXPECT_THAT(schedule.unclaimed(), ElementsAre(0, 3));
  EXPECT_EQ(schedule.num_late(), 0u);
  for (const size_t unit : {0, 1, 2, 3}) schedule.released(unit);
  EXPECT_EQ(schedule.num_unneeded(), 2u);
}

TEST(GatherScheduleTest, WhatIsNotExpectedAnyMoreIsLateBehindTheRest) {
  GatherSchedule schedule(3, /*depth=*/1);
  schedule.begin({0, 1, 2});
  schedule.needs(0);
  schedule.released(0);
  EXPECT_EQ(schedule.needs(0), (GatherStep{.launch = {2}, .is_late = true}));
  EXPECT_EQ(schedule.num_late(), 1u);
  EXPECT_THAT(schedule.record(), ElementsAre(0, 0));
  EXPECT_EQ(schedule.needs(0), (GatherStep{})) << "it is claimed";
}

TEST(GatherScheduleTest, TellsWhatANeedLeavesOutAndWaitsFor) {
  GatherSchedule schedule(4, /*depth=*/1);
  schedule.begin({3, 2, 1, 3, 0});
  EXPECT_THAT(schedule.left_out_by(3), IsEmpty());
  EXPECT_THAT(schedule.left_out_by(1), ElementsAre(3, 2));
  EXPECT_EQ(schedule.awaited_by(1), 2u);
  EXPECT_THAT(schedule.launch_through(1), ElementsAre(2, 1));
  EXPECT_EQ(schedule.num_launched(), 3u);
  EXPECT_EQ(schedule.awaited_by(3), 0u) << "the gather that it is there of";
  EXPECT_EQ(schedule.needs(1), (GatherStep{}));
  EXPECT_THAT(schedule.left_out_by(1), IsEmpty()) << "it is claimed";
  EXPECT_EQ(schedule.awaited_by(2), 1u) << "it was passed over";
  schedule.released(1);
  EXPECT_EQ(schedule.awaited_by(1), schedule.num_expected()) << "it is late";
  EXPECT_THAT(schedule.left_out_by(1), IsEmpty());
  EXPECT_THAT(schedule.launch_through(1), IsEmpty());
}

TEST(GatherScheduleTest, AllIsLateOutsideOfAPass) {
  GatherSchedule schedule(1, /*depth=*/1);
  EXPECT_EQ(schedule.needs(0), (GatherStep{.is_late = true}));
}

TEST(GatherScheduleTest, GathersAUnitAsOftenAsItIsExpected) {
  GatherSchedule schedule(2, /*depth=*/1);
  EXPECT_THAT(schedule.begin({0, 1, 0}), ElementsAre(0));
  EXPECT_EQ(schedule.needs(0), (GatherStep{.launch = {1}}));
  schedule.released(0);
  EXPECT_EQ(schedule.needs(1), (GatherStep{.launch = {0}}));
  schedule.released(1);
  EXPECT_EQ(schedule.needs(0), (GatherStep{}));
  EXPECT_EQ(schedule.num_late(), 0u);
}

// Ranks with other programs launch the same, and what each of them needs is
// there when it is needed; a rank is late only where it needs more than was
// expected.
TEST(GatherScheduleTest, LaunchesTheSameForAnyProgram) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 3000; ++trial) {
    const size_t num_units = 1 + random() % 6;
    const size_t depth = random() % 4;
    Units expected;
    for (size_t i = random() % 10; i > 0; --i) {
      expected.push_back(random() % num_units);
    }
    GatherSchedule schedule(num_units, depth);
    Units launched = schedule.begin(expected);
    EXPECT_LE(launched.size(), depth);
    bool was_late = false;
    for (size_t i = random() % 12; i > 0; --i) {
      const size_t unit = random() % num_units;
      if (random() % 3 == 0 && schedule.is_there(unit)) {
        schedule.released(unit);
        continue;
      }
      const bool was_there = schedule.is_there(unit);
      const GatherStep step = schedule.needs(unit);
      launched.insert(launched.end(), step.launch.begin(), step.launch.end());
      ASSERT_LE(launched.size(), expected.size());
      ASSERT_TRUE(
          std::equal(launched.begin(), launched.end(), expected.begin()));
      ASSERT_TRUE(schedule.is_claimed(unit));
      const bool is_launched_now =
          std::ranges::find(step.launch, unit) != step.launch.end();
      if (step.is_late) {
        ASSERT_FALSE(was_there);
        ASSERT_EQ(launched.size(), expected.size());
        was_late = true;
      } else {
        ASSERT_TRUE(was_there || is_launched_now);
      }
    }
    const Units rest = schedule.rest();
    launched.insert(launched.end(), rest.begin(), rest.end());
    EXPECT_EQ(launched, expected);
    EXPECT_EQ(was_late, schedule.num_late() > 0);
  }
}

TEST(GatherScheduleTest, AProgramThatIsExpectedIsNeverLateAndHoldsNoMore) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 1000; ++trial) {
    const size_t num_units = 1 + random() % 8;
    const size_t depth = random() % 3;
    Units program(num_units);
    for (size_t unit = 0; unit < num_units; ++unit) program[unit] = unit;
    std::ranges::shuffle(program, random);
    GatherSchedule schedule(num_units, depth);
    schedule.begin(program);
    for (const size_t unit : program) {
      ASSERT_FALSE(schedule.needs(unit).is_late);
      size_t num_there = 0;
      for (size_t other = 0; other < num_units; ++other) {
        num_there += schedule.is_there(other);
      }
      ASSERT_LE(num_there, depth + 1);
      schedule.released(unit);
    }
    EXPECT_THAT(schedule.rest(), IsEmpty());
    EXPECT_THAT(schedule.unclaimed(), IsEmpty());
    EXPECT_EQ(schedule.record(), program);
  }
}

}  // namespace
}  // namespace brigade
