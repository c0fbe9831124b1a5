#include "brigade/comm/control/status_check.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace status_check_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using enum StatusKind;
using Statuses = std::vector<RankStatus>;

// After these on the first group, and on a second one.
RankStatus launched(const GroupCounts& counts, const GroupCounts& second = {}) {
  RankStatus rank_status = {.kind = kEnd};
  rank_status.by_group[0] = counts;
  rank_status.by_group[1] = second;
  return rank_status;
}

RankStatus ended(int64_t iteration) {
  RankStatus rank_status = launched({.launches = 3});
  rank_status.iteration = iteration;
  return rank_status;
}

RankStatus failed(int64_t iteration, std::string_view words) {
  return {.kind = kFailed, .iteration = iteration, .text = status_text(words)};
}

// The text of the difference; fails when all are found equal.
std::string difference(const Statuses& by_rank) {
  const absl::Status status = check_statuses(by_rank);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  return std::string(status.message());
}

std::string failure(const Statuses& by_rank) {
  const absl::Status status = check_statuses(by_rank);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  return std::string(status.message());
}

TEST(CheckStatusesTest, EqualOnesAreRight) {
  EXPECT_TRUE(check_statuses(Statuses{ended(7)}).ok());
  EXPECT_TRUE(check_statuses(Statuses(4, ended(7))).ok());
}

TEST(CheckStatusesTest, WhatMakesNoDifferenceIsNotCompared) {
  Statuses by_rank(2, ended(7));
  by_rank[0].sequence = 1;
  by_rank[0].by_group[0].foreign = 5;
  EXPECT_TRUE(check_statuses(by_rank).ok());
}

TEST(CheckStatusesTest, ARankInAnotherIterationIsNamed) {
  EXPECT_EQ(
      difference({ended(7), ended(8), ended(7), ended(7)}),
      "expected every rank in the same place: ranks 0, 2, 3 ended "
      "iteration 7 after 3 launches, rank 1 ended iteration 8 after 3 "
      "launches.\n"
      "Run forward and backward equally often on every rank, and forwards "
      "without backward under no_grad.");
}

TEST(CheckStatusesTest, ARankThatDoesSomethingElseIsNamed) {
  EXPECT_EQ(
      difference({ended(7), {.kind = kIdle, .iteration = 7}}),
      "expected every rank in the same place: rank 0 ended iteration 7 "
      "after 3 launches, rank 1 ran no backward in iteration 7.\n"
      "Run forward and backward equally often on every rank, and forwards "
      "without backward under no_grad.");
}

TEST(CheckStatusesTest, DifferentPlacesAreNamed) {
  EXPECT_EQ(
      difference({{.kind = kIdle, .unit = -1}, {.kind = kIdle, .unit = 0}}),
      "expected every rank in the same place: rank 0 ran no backward in "
      "iteration 0, rank 1 ran no backward in iteration 0 and is behind "
      "another "
      "forward.\n"
      "Run forward and backward equally often on every rank, and forwards "
      "without backward under no_grad.");
}

TEST(CheckStatusesTest, DifferentPlansAreNamedWithWhatTheyStandFor) {
  Statuses by_rank(2, {.kind = kBegin,
                       .iteration = 7,
                       .fingerprint = 0xab,
                       .text = status_text("3 buckets")});
  by_rank[1].fingerprint = 0xcd;
  by_rank[1].text = {};
  EXPECT_EQ(difference(by_rank),
            "expected the same plan and options on every rank in iteration 7: "
            "rank 0 has 00000000000000ab (3 buckets), rank 1 has "
            "00000000000000cd.\nGive every rank the same options.");
}

TEST(CheckStatusesTest, DifferentDeedsAreNamed) {
  Statuses by_rank(2, {.kind = StatusKind::kAsk,
                       .iteration = 7,
                       .fingerprint = 0xab,
                       .text = status_text("gathers all units")});
  by_rank[1].fingerprint = 0xcd;
  by_rank[1].text = status_text("began a forward");
  EXPECT_EQ(
      difference(by_rank),
      "expected the same of every rank behind iteration 7: rank 0 gathers "
      "all units, rank 1 began a forward.\nCall the same on all ranks, in "
      "the same order.");
}

TEST(CheckStatusesTest, DifferentNumbersOfLaunchesAreNamed) {
  Statuses by_rank(3, ended(7));
  by_rank[2].by_group[0].launches = 2;
  EXPECT_EQ(difference(by_rank),
            "expected the same number of launches on every rank in iteration "
            "7: ranks 0, 1 have 3, rank 2 has 2.\n"
            "Launch equally often on every rank.");
}

TEST(CheckStatusesTest, AFailureIsToldBeforeAnyDifference) {
  EXPECT_EQ(failure({ended(7), failed(8, "no memory"), ended(7)}),
            "rank 1 failed in iteration 8: no memory");
}

TEST(CheckStatusesTest, RanksThatFailAlikeAreToldTogether) {
  EXPECT_EQ(failure({failed(7, "bad input"), failed(7, "no memory"),
                     failed(7, "bad input")}),
            "ranks 0, 2 failed in iteration 7: bad input\n"
            "rank 1 failed in iteration 7: no memory");
}

TEST(CheckStatusesTest, AllRanksFailingAlikeIsAFailureToo) {
  EXPECT_EQ(failure(Statuses(2, failed(7, "x"))),
            "ranks 0, 1 failed in iteration 7: x");
}

TEST(CheckStatusesTest, DifferentNumbersOfLaunchesOnAGroupAreNamed) {
  EXPECT_EQ(difference({launched({.launches = 3}, {.launches = 1}),
                        launched({.launches = 3}, {.launches = 2})}),
            "expected the same number of launches on every rank in iteration "
            "0: rank 0 has 1, rank 1 has 2 on group 1.\n"
            "Launch equally often on every rank.");
}

RankStatus wanting(int64_t unit) { return {.kind = kAsk, .unit = unit}; }

TEST(WantedUnitsTest, AreThoseOfAllRanksOnceInRisingOrder) {
  EXPECT_THAT(wanted_units(Statuses{wanting(4),
                                    {.kind = kEnd},
                                    wanting(2),
                                    wanting(4),
                                    {.kind = kBegin}}),
              ElementsAre(2, 4));
  EXPECT_THAT(wanted_units(Statuses{{.kind = kEnd}, wanting(-1)}), IsEmpty());
}

TEST(WantedUnitsTest, AreNoneWhereARankHasFailedOrWouldGiveAnother) {
  EXPECT_THAT(wanted_units(Statuses{wanting(4), failed(7, "x")}), IsEmpty());
  RankStatus other = {.kind = kBegin, .proposal = 1};
  EXPECT_THAT(wanted_units(Statuses{wanting(4), other}), IsEmpty());
  other.kind = kEnd;  // proposes
  EXPECT_THAT(wanted_units(Statuses{wanting(4), other}), ElementsAre(4));
}

// Its deficit on the first group.
int32_t deficit_of(int rank, const Statuses& by_rank) {
  return (*launch_deficit(by_rank, rank))[0];
}

TEST(LaunchDeficitTest, IsWhatTheFurthestRankHasMore) {
  const Statuses by_rank = {
      launched({.launches = 1}), launched({.launches = 3}), {}};
  EXPECT_EQ(deficit_of(0, by_rank), 2);
  EXPECT_EQ(deficit_of(1, by_rank), 0);
  EXPECT_EQ(deficit_of(2, by_rank), 3);
}

TEST(LaunchDeficitTest, IsThatOfEachGroup) {
  const Statuses by_rank = {launched({.launches = 1}, {.launches = 5}),
                            launched({.launches = 3}, {.launches = 1}),
                            launched({.launches = 2}, {.launches = 7})};
  const std::vector<std::pair<int, int>> expected = {{2, 2}, {0, 6}, {1, 0}};
  for (int rank = 0; rank < 3; ++rank) {
    const LaunchDeficit deficit = *launch_deficit(by_rank, rank);
    EXPECT_EQ(std::pair(deficit[0], deficit[1]), expected[rank]);
    EXPECT_EQ(deficit[2], 0);
  }
}

TEST(LaunchDeficitTest, CollectivesOfOthersThatAllRanksLaunchedDoNoHarm) {
  EXPECT_EQ(deficit_of(0, {launched({.launches = 1, .foreign = 5}),
                           launched({.launches = 3, .foreign = 5})}),
            2);
}

TEST(LaunchDeficitTest, CollectivesOfOthersInBetweenLetNothingBeLaunched) {
  const Statuses by_rank = {launched({.launches = 1, .foreign = 0}),
                            launched({.launches = 3, .foreign = 1}),
                            launched({.launches = 3, .foreign = 1})};
  const std::string expected =
      "ranks can't be brought in step: behind by 2, 0, 0 launches (by rank), "
      "but in between the group has launched 0, 1, 1 other collectives (by "
      "rank).\nMake a new process group on all ranks.";
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(launch_deficit(by_rank, rank).status().message(), expected);
  }
}

TEST(LaunchDeficitTest, CollectivesOfOthersOnAGroupLetNothingBeLaunched) {
  const Statuses by_rank = {
      launched({.launches = 1}, {.launches = 2, .foreign = 3}),
      launched({.launches = 1}, {.launches = 2, .foreign = 4})};
  EXPECT_EQ(launch_deficit(by_rank, 0).status().message(),
            "ranks can't be brought in step: behind by 0, 0 launches (by rank) "
            "on group 1, but in between the group has launched 3, 4 other "
            "collectives (by rank).\nMake a new process group on all ranks.");
}

TEST(LaunchDeficitTest, EqualLaunchesWithDifferentCollectivesOfTheGroupAreOut) {
  const Statuses by_rank = {launched({.launches = 3, .foreign = 0}),
                            launched({.launches = 3, .foreign = 1})};
  EXPECT_FALSE(launch_deficit(by_rank, 0).ok());
}

TEST(LaunchDeficitTest, AGroupThatDoesNotCountIsBelieved) {
  EXPECT_EQ(deficit_of(0, {launched({.launches = 1}),
                           launched({.launches = 3, .foreign = 1})}),
            2);
}

// `foreign`: with those of the opening.
RankStatus opened(int32_t foreign, OpeningTold opening) {
  RankStatus told = launched({.launches = 1, .foreign = foreign});
  told.opening = opening;
  return told;
}

int lacked_by(int rank, const Statuses& by_rank) {
  return lacked_opening(by_rank, rank).num_collectives;
}

constexpr OpeningTold kOpening = {.num_collectives = 2, .form = 7};

TEST(LackedOpeningTest, IsWhatPeersHaveLaunchedMore) {
  const Statuses by_rank = {opened(3, kOpening), opened(1, {}),
                            opened(3, kOpening)};
  EXPECT_EQ(lacked_by(0, by_rank), 0);
  EXPECT_EQ(lacked_by(1, by_rank), 2);
  EXPECT_EQ(lacked_opening(by_rank, 1).form, 7);
  EXPECT_TRUE(launch_deficit(by_rank, 1).ok());
}

// It has met them in another way.
TEST(LackedOpeningTest, IsNothingWhereARankHasLaunchedAsMuch) {
  const Statuses by_rank = {opened(2, kOpening), opened(2, {})};
  EXPECT_EQ(lacked_by(1, by_rank), 0);
  EXPECT_TRUE(launch_deficit(by_rank, 1).ok());
}

TEST(LackedOpeningTest, DoesNotHideOtherCollectives) {
  for (const int32_t foreign : {3, 1}) {
    const Statuses by_rank = {opened(foreign, kOpening), opened(0, {})};
    EXPECT_EQ(lacked_by(1, by_rank), 0);
    EXPECT_FALSE(launch_deficit(by_rank, 1).ok());
  }
}

TEST(LackedOpeningTest, IsNotKnownOfAGroupThatDoesNotCount) {
  const Statuses by_rank = {opened(kUnknownCount, kOpening),
                            opened(kUnknownCount, {})};
  EXPECT_EQ(lacked_by(1, by_rank), 0);
}

// All that tells ranks apart which have nothing to say.
TEST(FollowUpTest, AgreesOnlyIfGroupsHaveLaunchedAsMuch) {
  RankStatus ahead = opened(2, kOpening);
  RankStatus behind = opened(0, {});
  ahead.kind = behind.kind = StatusKind::kFollowUp;
  EXPECT_FALSE(agree(ahead, behind));
  EXPECT_FALSE(check_statuses(Statuses{ahead, behind}).ok());
  ahead.kind = behind.kind = kEnd;
  EXPECT_TRUE(agree(ahead, behind));
  EXPECT_TRUE(check_statuses(Statuses{ahead, behind}).ok());
}

TEST(LaunchDeficitTest, ThatOfAnotherPlanCannotBeLaunched) {
  for (const size_t group : {0, 1}) {
    Statuses by_rank(2);
    for (int rank = 0; rank < 2; ++rank) {
      by_rank[rank].fingerprint = rank;
      by_rank[rank].by_group[group].launches = 1 + 2 * rank;
    }
    EXPECT_THAT(
        std::string(launch_deficit(by_rank, 1).status().message()),
        ::testing::ContainsRegex("behind by 2, 0 launches \\(by rank\\)( on "
                                 "group 1)?, of different"));
  }
}

TEST(LaunchDeficitTest, NothingCanBeLaunchedWhereARankHasAbortedTheGroup) {
  for (const size_t group : {0, 1}) {
    Statuses by_rank = {launched({.launches = 1}), {}, {}};
    by_rank[1].by_group[group].launches = kAbortedGroup;
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(launch_deficit(by_rank, rank).status().message(),
                "ranks can't be brought in step: rank 1 can't go on with "
                "the group.\nMake a new process group on all ranks.");
    }
  }
}

}  // namespace status_check_test
}  // namespace brigade
