#include "brigade/fsdp/gather_schedule.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Units = std::vector<size_t>;

// Does what a schedule says, and notes what is in flight and what is held. Each
// use waits for its unit, frees what was dropped, and frees the unit again
// unless it is kept.
class Owner {
 public:
  explicit Owner(GatherScheduleOptions options, size_t num_units = 8)
      : options_(options),
        schedule_(*GatherSchedule::create(num_units, options)) {}

  GatherStep forward_begins(bool goes_backward = true) {
    return follow(schedule_.forward_begins(goes_backward));
  }
  GatherStep backward_begins() { return follow(schedule_.backward_begins()); }
  GatherStep end() { return follow(schedule_.end()); }

  GatherStep begin_use(size_t unit) {
    const bool was_there = is_there(unit);
    const size_t num_before = launched_.size();
    GatherStep step = schedule_.needs(unit);
    EXPECT_EQ(std::ranges::count(step.launch, unit), was_there ? 0 : 1);
    EXPECT_TRUE(was_there || step.launch.front() == unit);
    EXPECT_FALSE(was_there && step.is_mispredicted);
    for (const size_t launched : step.launch) launch(launched);
    ahead_.erase(unit);
    wait_for(unit);
    num_late_ += !was_there;
    free_all(step.drop);
    EXPECT_LE(ahead_.size(), options_.prefetch_depth);
    last_launched_.assign(launched_.begin() + num_before, launched_.end());
    return step;
  }

  void free(size_t unit) {
    EXPECT_TRUE(is_there(unit)) << unit << " is not there";
    in_flight_.erase(unit);
    held_.erase(unit);
    ahead_.erase(unit);
    launch_all(schedule_.released(unit));
  }

  void wait_for(size_t unit) {
    if (in_flight_.erase(unit) == 0) return;
    held_.insert(unit);
    launch_all(schedule_.gathered(unit));
  }

  // The units launched from need to need.
  Units use(size_t unit) {
    begin_use(unit);
    free(unit);
    return last_launched_;
  }

  void use_all(const Units& units) {
    for (const size_t unit : units) use(unit);
  }

  bool is_there(size_t unit) const {
    return in_flight_.contains(unit) || held_.contains(unit);
  }
  const std::set<size_t>& in_flight() const { return in_flight_; }
  const std::set<size_t>& held() const { return held_; }
  const std::set<size_t>& ahead() const { return ahead_; }
  const Units& launched() const { return launched_; }
  size_t num_late() const { return num_late_; }
  size_t num_mispredicted() const { return schedule_.num_mispredicted(); }

 private:
  GatherStep follow(GatherStep step) {
    launch_all(step.launch);
    free_all(step.drop);
    EXPECT_FALSE(step.is_mispredicted);
    return step;
  }

  void launch(size_t unit) {
    EXPECT_FALSE(is_there(unit)) << unit << " is gathered twice";
    in_flight_.insert(unit);
    ahead_.insert(unit);
    launched_.push_back(unit);
    EXPECT_LE(in_flight_.size(), options_.max_in_flight);
  }

  void launch_all(const Units& units) {
    for (const size_t unit : units) launch(unit);
  }

  void free_all(const Units& units) {
    for (const size_t unit : units) {
      EXPECT_TRUE(ahead_.contains(unit)) << unit << " is in use";
      free(unit);
    }
  }

  GatherScheduleOptions options_;
  GatherSchedule schedule_;
  std::set<size_t> in_flight_;
  std::set<size_t> held_;
  std::set<size_t> ahead_;  // launched, not needed since
  Units launched_;
  Units last_launched_;
  size_t num_late_ = 0;
};

void iterate(Owner& owner, const Units& forward) {
  owner.forward_begins();
  owner.use_all(forward);
  owner.backward_begins();
  owner.use_all({forward.rbegin(), forward.rend()});
  owner.end();
}

TEST(GatherScheduleTest, TheFirstForwardGathersEachUnitWhenItIsNeeded) {
  Owner owner({.prefetch_depth = 2, .max_in_flight = 3});
  EXPECT_EQ(owner.forward_begins(), GatherStep{});
  for (const size_t unit : {0, 1, 2}) {
    EXPECT_THAT(owner.use(unit), ElementsAre(unit));
  }
  EXPECT_EQ(owner.num_mispredicted(), 0u);
}

TEST(GatherScheduleTest, BackwardGoesTheReverseWayOfThisForward) {
  Owner owner({});
  owner.forward_begins();
  owner.use_all({0, 1, 2});
  EXPECT_THAT(owner.backward_begins().launch, ElementsAre(2));
  EXPECT_THAT(owner.use(2), ElementsAre(1));
  EXPECT_THAT(owner.use(1), ElementsAre(0));
  EXPECT_THAT(owner.use(0), IsEmpty());
  EXPECT_EQ(owner.end(), GatherStep{});
  EXPECT_EQ(owner.num_mispredicted(), 0u);
}

TEST(GatherScheduleTest, ForwardGoesTheWayOfTheLastOne) {
  Owner owner({.prefetch_depth = 2, .max_in_flight = 3});
  iterate(owner, {0, 1, 2, 3});
  EXPECT_THAT(owner.forward_begins().launch, ElementsAre(0, 1));
  EXPECT_THAT(owner.use(0), ElementsAre(2));
  EXPECT_THAT(owner.use(1), ElementsAre(3));
  EXPECT_THAT(owner.use(2), IsEmpty());
}

TEST(GatherScheduleTest, WithoutDepthNothingIsAheadAndNothingMispredicted) {
  Owner owner({.prefetch_depth = 0});
  iterate(owner, {0, 1, 2});
  EXPECT_EQ(owner.forward_begins(), GatherStep{});
  for (const size_t unit : {0, 2, 1}) {
    EXPECT_THAT(owner.use(unit), ElementsAre(unit));
  }
  EXPECT_EQ(owner.num_mispredicted(), 0u);
}

TEST(GatherScheduleTest, WithOneInFlightNothingIsAhead) {
  Owner owner({.prefetch_depth = 3, .max_in_flight = 1});
  iterate(owner, {0, 1, 2});
  EXPECT_EQ(owner.forward_begins(), GatherStep{});
  EXPECT_THAT(owner.use(0), ElementsAre(0));
  EXPECT_THAT(owner.use(1), ElementsAre(1));
  EXPECT_EQ(owner.num_mispredicted(), 0u);
}

TEST(GatherScheduleTest, WhatTheLimitHoldsBackIsLaunchedWhenOneIsWaitedFor) {
  auto schedule =
      *GatherSchedule::create(4, {.prefetch_depth = 3, .max_in_flight = 2});
  schedule.forward_begins(true);
  for (const size_t unit : {0, 1, 2, 3}) {
    schedule.needs(unit);
    schedule.gathered(unit);
    schedule.released(unit);
  }
  EXPECT_THAT(schedule.backward_begins().launch, ElementsAre(3));
  // Waited for ahead of its need: there is room for one more.
  EXPECT_THAT(schedule.gathered(3), ElementsAre(2));
  EXPECT_THAT(schedule.gathered(2), ElementsAre(1));
  EXPECT_THAT(schedule.needs(3).launch, IsEmpty());
  EXPECT_THAT(schedule.gathered(1), ElementsAre(0));
}

TEST(GatherScheduleTest, AnUnforeseenUnitIsLateAndThePredictionGoesOn) {
  Owner owner({});
  iterate(owner, {0, 1, 2});
  owner.forward_begins();
  owner.use(0);
  const GatherStep step = owner.begin_use(5);
  EXPECT_THAT(step.launch, ElementsAre(5));
  EXPECT_THAT(step.drop, IsEmpty());
  EXPECT_TRUE(step.is_mispredicted);
  owner.free(5);
  EXPECT_THAT(owner.use(1), ElementsAre(2)) << "1 was still ahead";
  EXPECT_EQ(owner.num_mispredicted(), 1u);
}

TEST(GatherScheduleTest, ASkippedUnitIsDroppedAndWhatFollowsIsAheadAgain) {
  Owner owner({});
  iterate(owner, {0, 1, 2, 3});
  owner.forward_begins();
  owner.use(0);
  EXPECT_EQ(owner.begin_use(2),
            (GatherStep{.launch = {2}, .drop = {1}, .is_mispredicted = true}));
  owner.free(2);
  EXPECT_THAT(owner.in_flight(), ElementsAre(3));
  EXPECT_THAT(owner.use(3), IsEmpty());
}

TEST(GatherScheduleTest, ASkipWithinWhatIsAheadIsNotLate) {
  Owner owner({.prefetch_depth = 2, .max_in_flight = 4});
  iterate(owner, {0, 1, 2, 3});
  owner.forward_begins();
  owner.use(0);
  const GatherStep step = owner.begin_use(2);
  EXPECT_THAT(step.launch, ElementsAre(3));
  EXPECT_THAT(step.drop, ElementsAre(1));
  EXPECT_FALSE(step.is_mispredicted);
}

TEST(GatherScheduleTest, WhatAForwardLeavesOutIsDroppedWhenItIsOver) {
  Owner owner({});
  iterate(owner, {0, 1, 2});
  owner.forward_begins();
  owner.use(0);
  const GatherStep step = owner.backward_begins();
  EXPECT_THAT(step.drop, ElementsAre(1));
  owner.use(0);
  EXPECT_EQ(owner.end(), GatherStep{});
}

TEST(GatherScheduleTest, WhatWasDroppedIsNotDroppedAgain) {
  Owner owner({});
  owner.forward_begins();
  owner.use_all({0, 1});
  owner.end();
  owner.forward_begins(false);
  owner.use_all({1});
  EXPECT_THAT(owner.end().drop, IsEmpty());
}

TEST(GatherScheduleTest, AUnitCalledTwiceIsGatheredTwice) {
  Owner owner({});
  iterate(owner, {0, 1, 0, 2});
  owner.forward_begins();
  EXPECT_THAT(owner.use(0), ElementsAre(1));
  EXPECT_THAT(owner.use(1), ElementsAre(0));
  EXPECT_THAT(owner.use(0), ElementsAre(2));
  EXPECT_THAT(owner.use(2), IsEmpty());
  EXPECT_EQ(owner.num_mispredicted(), 0u);
}

TEST(GatherScheduleTest, ANeedOfWhatIsHeldLaunchesOnlyWhatIsAhead) {
  Owner owner({});
  owner.forward_begins();
  owner.begin_use(0);
  EXPECT_THAT(owner.begin_use(0).launch, IsEmpty());
  owner.begin_use(1);
  EXPECT_THAT(owner.backward_begins().launch, IsEmpty()) << "1 was kept";
  EXPECT_THAT(owner.begin_use(1).launch, IsEmpty());
}

TEST(GatherScheduleTest, RecomputationNeedsAUnitOnceMoreWhileItIsHeld) {
  Owner owner({});
  owner.forward_begins();
  owner.use_all({0, 1, 0, 2});
  owner.backward_begins();
  for (const size_t unit : {2, 0, 1, 0}) {
    EXPECT_FALSE(owner.begin_use(unit).is_mispredicted);   // by recomputation
    EXPECT_THAT(owner.begin_use(unit).launch, IsEmpty());  // by its backward
    owner.free(unit);
  }
  EXPECT_EQ(owner.num_late(), 4u) << "the first forward's";
}

TEST(GatherScheduleTest, AForwardWithoutGradientsIsNoPartOfBackward) {
  Owner owner({});
  owner.forward_begins();
  owner.use_all({0, 1});
  owner.forward_begins(false);
  owner.use_all({4, 5});
  EXPECT_THAT(owner.backward_begins().drop, ElementsAre(0));
  EXPECT_THAT(owner.in_flight(), ElementsAre(1));
}

TEST(GatherScheduleTest, TwoForwardsAndTwoBackwards) {
  Owner owner({});
  owner.forward_begins();
  owner.use_all({0, 1});
  owner.forward_begins();
  owner.use_all({2, 3});
  for (int loss = 0; loss < 2; ++loss) {
    owner.backward_begins();
    EXPECT_THAT(owner.in_flight(), ElementsAre(3));
    EXPECT_THAT(owner.use(3), ElementsAre(2));
    EXPECT_THAT(owner.use(2), ElementsAre(1));
    EXPECT_THAT(owner.use(1), ElementsAre(0));
    EXPECT_THAT(owner.use(0), IsEmpty());
  }
}

TEST(GatherScheduleTest, OutsideOfAnIterationNothingIsPredicted) {
  Owner owner({});
  iterate(owner, {0, 1, 2});
  EXPECT_THAT(owner.use(0), ElementsAre(0));
  EXPECT_EQ(owner.num_mispredicted(), 0u);
  EXPECT_THAT(owner.forward_begins().launch, ElementsAre(0));
}

TEST(GatherScheduleTest, ARepeatedProgramIsLateInItsFirstForwardOnly) {
  std::mt19937 random(5);
  const auto up_to = [&](size_t most) {
    return std::uniform_int_distribution<size_t>(0, most)(random);
  };
  for (int round = 0; round < 500; ++round) {
    const size_t depth = 1 + up_to(3);
    Owner owner({.prefetch_depth = depth, .max_in_flight = depth + 1});
    Units forward(1 + up_to(11));
    for (size_t& unit : forward) unit = up_to(7);
    for (int iteration = 0; iteration < 3; ++iteration) iterate(owner, forward);
    EXPECT_EQ(owner.num_late(), forward.size());
    EXPECT_EQ(owner.num_mispredicted(), 0u);
    EXPECT_EQ(owner.launched().size(), 6 * forward.size());
    EXPECT_THAT(owner.ahead(), IsEmpty());
  }
}

// The owner checks the limit, the depth, and that each need is met once.
TEST(GatherScheduleTest, AnyProgramIsServedWithinDepthAndLimit) {
  std::mt19937 random(7);
  const auto up_to = [&](size_t most) {
    return std::uniform_int_distribution<size_t>(0, most)(random);
  };
  size_t num_mispredicted = 0;
  for (int round = 0; round < 2000 && !HasFailure(); ++round) {
    SCOPED_TRACE(round);
    const GatherScheduleOptions options = {.prefetch_depth = up_to(4),
                                           .max_in_flight = 1 + up_to(4)};
    Owner owner(options);
    Units usual(1 + up_to(9));
    for (size_t& unit : usual) unit = up_to(7);
    std::set<size_t> in_use;
    const auto visit = [&](Units units) {
      for (size_t unit : units) {
        if (up_to(9) == 0) continue;         // skipped
        if (up_to(9) == 0) unit = up_to(7);  // another one
        for (size_t times = up_to(5) ? 1 : 2; times > 0; --times) {
          owner.begin_use(unit);
          in_use.insert(unit);
        }
        EXPECT_TRUE(owner.held().contains(unit));
        for (const size_t used : in_use) {
          EXPECT_TRUE(owner.held().contains(used)) << "lost";
        }
        if (up_to(4) == 0 && !owner.ahead().empty()) {
          owner.wait_for(*owner.ahead().begin());
        }
        while (!in_use.empty() && up_to(3)) {
          const size_t freed = *in_use.begin();
          in_use.erase(freed);
          owner.free(freed);
        }
      }
    };
    for (int iteration = 0; iteration < 5; ++iteration) {
      owner.forward_begins(up_to(4) != 0);
      visit(usual);
      if (up_to(5) == 0) {
        owner.forward_begins(up_to(1) != 0);
        visit(usual);
      }
      if (up_to(5)) {
        owner.backward_begins();
        visit({usual.rbegin(), usual.rend()});
      }
      if (up_to(9) == 0) visit({up_to(7)});
      owner.end();
      EXPECT_THAT(owner.ahead(), IsEmpty());
      EXPECT_EQ(owner.held(), in_use) << "held for nothing";
      EXPECT_THAT(owner.in_flight(), IsEmpty());
    }
    num_mispredicted += owner.num_mispredicted();
  }
  EXPECT_GT(num_mispredicted, 1000u);
}

TEST(GatherScheduleTest, RefusesALimitOfNothing) {
  const auto error_of = [](size_t num_units, GatherScheduleOptions options) {
    return std::string(
        GatherSchedule::create(num_units, options).status().message());
  };
  EXPECT_THAT(error_of(2, {.max_in_flight = 0}),
              HasSubstr("max_in_flight >= 1, got 0"));
  EXPECT_THAT(error_of(0, {}), HasSubstr("at least 1 unit, got 0"));
}

}  // namespace
}  // namespace brigade
