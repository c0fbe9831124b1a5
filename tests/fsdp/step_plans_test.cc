#include "brigade/fsdp/schedule/step_plans.h"

#include <cstdint>
#include <span>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace step_plans_test {

using ::testing::IsEmpty;

using Uses = std::vector<RecordedUse>;

Uses step_of(int64_t bytes) {
  return {{{0, 0, Purpose::kForward}, {.begin = 0, .end = 1, .bytes = bytes}}};
}

class StepPlansTest : public ::testing::Test {
 protected:
  // Of so many bytes, which a plan of calls has 8 of.
  bool follow(int64_t bytes, bool is_as_planned) {
    return plans_.follow(
        {.uses = step_of(bytes), .is_as_planned = is_as_planned},
        [](std::span<const RecordedUse> step) {
          return step.front().interval.bytes <= 8;
        });
  }
  // Behind the first steps, which are believed.
  void begin() {
    for (int step = 0; step < 3; ++step) follow(8, /*is_as_planned=*/true);
  }

  StepPlans plans_;
};

TEST_F(StepPlansTest, WhatIsAsPlannedStaysPlannedByItsCalls) {
  for (int step = 0; step < 20; ++step) {
    EXPECT_FALSE(follow(step % 3, /*is_as_planned=*/true));
  }
  EXPECT_THAT(plans_.planned(), IsEmpty());
}

TEST_F(StepPlansTest, TheFirstThreeStepsAreBelieved) {
  EXPECT_TRUE(follow(16, /*is_as_planned=*/false));
  EXPECT_EQ(plans_.planned(), step_of(16));
  EXPECT_TRUE(follow(32, /*is_as_planned=*/false));
  EXPECT_EQ(plans_.planned(), step_of(32));
  EXPECT_TRUE(follow(24, /*is_as_planned=*/true)) << "also what takes less";
  EXPECT_EQ(plans_.planned(), step_of(24));
  EXPECT_FALSE(follow(64, /*is_as_planned=*/false));
  EXPECT_EQ(plans_.planned(), step_of(24));
}

TEST_F(StepPlansTest, LaterOnesAreWhenTheyCameTwice) {
  begin();
  for (int step = 0; step < 6; ++step) {
    EXPECT_FALSE(follow(16, /*is_as_planned=*/false));
    EXPECT_FALSE(follow(8, /*is_as_planned=*/true));
  }
  EXPECT_FALSE(follow(16, /*is_as_planned=*/false));
  EXPECT_TRUE(follow(16, /*is_as_planned=*/false));
  EXPECT_EQ(plans_.planned(), step_of(16));
  EXPECT_FALSE(follow(16, /*is_as_planned=*/true));
}

TEST_F(StepPlansTest, WhatTakesLessIsWhenItCameNineTimes) {
  begin();
  for (const int64_t less : {12, 8}) {
    follow(16, /*is_as_planned=*/false);
    follow(16, /*is_as_planned=*/false);
    EXPECT_EQ(plans_.planned(), step_of(16));
    for (int step = 0; step < 8; ++step) {
      EXPECT_FALSE(follow(less, /*is_as_planned=*/true));
    }
    EXPECT_TRUE(follow(less, /*is_as_planned=*/true));
    EXPECT_FALSE(follow(less, /*is_as_planned=*/true));
    // By its calls, if these are enough.
    EXPECT_EQ(plans_.planned(), less > 8 ? step_of(less) : Uses());
  }
}

TEST_F(StepPlansTest, OtherCallsArePlannedAsSuch) {
  follow(16, /*is_as_planned=*/false);
  plans_.calls_differ();
  EXPECT_THAT(plans_.planned(), IsEmpty());
}

TEST_F(StepPlansTest, WhatCouldNotBeRecordedIsNoPlan) {
  EXPECT_FALSE(
      plans_.follow({.is_as_planned = false},
                    [](std::span<const RecordedUse>) { return true; }));
}

}  // namespace step_plans_test
}  // namespace brigade
