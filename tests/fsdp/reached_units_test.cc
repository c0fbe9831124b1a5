#include "brigade/fsdp/schedule/reached_units.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;

using Calls = std::vector<UnitCall>;
using Flags = std::vector<char>;

TEST(AssumedReachedTest, UnitsInFrontOfAllThatIsTrainedAreNot) {
  EXPECT_THAT(assumed_reached(Calls{{0}, {1}, {2}, {3}}, {0, 0, 1, 0}),
              ElementsAre(0, 0, 1, 1));
}

TEST(AssumedReachedTest, NoneIsWhereNothingIsTrained) {
  EXPECT_THAT(assumed_reached(Calls{{0}, {1, 1}}, {0, 0}), ElementsAre(0, 0));
}

// One that is called around others may have used its own before them.
TEST(AssumedReachedTest, UnitsInsideOfATrainedOneAre) {
  EXPECT_THAT(assumed_reached(Calls{{0}, {1, 1}, {2, 1}}, {1, 0, 0}),
              ElementsAre(1, 1, 1));
}

// Which ends behind it.
TEST(AssumedReachedTest, AUnitAroundATrainedOneIs) {
  EXPECT_THAT(assumed_reached(Calls{{0}, {1, 1}, {2, 1}, {3}}, {0, 0, 1, 0}),
              ElementsAre(1, 0, 1, 1));
}

TEST(AssumedReachedTest, UnitsThatAreNotCalledAre) {
  EXPECT_THAT(assumed_reached(Calls{{1}, {0}}, {0, 0, 0}),
              ElementsAre(0, 0, 1));
}

TEST(ReachedUnitsTest, WhatAllRanksDoNotReachIsLeftOut) {
  ReachedUnits units(2);
  units.note({0, 1});
  EXPECT_FALSE(units.is_left_out(0));
  units.on_begun_together(/*are_alike=*/true);
  EXPECT_TRUE(units.is_left_out(0));
  EXPECT_FALSE(units.is_left_out(1));
  EXPECT_THAT(units.last_alike({1, 1}), ElementsAre(0, 1));
  units.backward_over();
  EXPECT_FALSE(units.is_left_out(0));
}

TEST(ReachedUnitsTest, NothingIsLeftOutWhereRanksDiffer) {
  ReachedUnits units(2);
  units.note({0, 1});
  units.on_begun_together(/*are_alike=*/false);
  EXPECT_FALSE(units.is_left_out(0));
  EXPECT_THAT(units.last_alike({1, 0}), ElementsAre(1, 0));
}

TEST(ReachedUnitsTest, ExpectsWhatIsAssumedUntilItIsSeen) {
  ReachedUnits units(2);
  EXPECT_THAT(units.expected({0, 1}), ElementsAre(0, 1));
  units.note({1, 0});
  units.on_begun_together(/*are_alike=*/false);
  EXPECT_THAT(units.expected({0, 1}), ElementsAre(0, 1));
  units.on_begun_together(/*are_alike=*/true);
  EXPECT_THAT(units.expected({0, 1}), ElementsAre(1, 0));
}

TEST(ReachedUnitsTest, WhatWasReachedOnceIsExpectedUntilOthersAreTrained) {
  ReachedUnits units(1);
  for (const char reached : {1, 0}) {
    units.note({reached});
    units.on_begun_together(/*are_alike=*/true);
    units.backward_over();
  }
  EXPECT_THAT(units.expected({0}), ElementsAre(1));
  units.forget();
  EXPECT_THAT(units.expected({0}), ElementsAre(0));
  EXPECT_THAT(units.last_alike({1}), ElementsAre(1));
}

}  // namespace
}  // namespace brigade
