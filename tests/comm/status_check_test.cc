#include "brigade/comm/status_check.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using enum StatusKind;
using Statuses = std::vector<RankStatus>;

RankStatus ended(int64_t iteration) {
  return {.kind = kEnd, .iteration = iteration, .launches = 3};
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

TEST(CheckStatusesTest, WhatOnlyTheChannelKnowsIsNotCompared) {
  Statuses by_rank(2, ended(7));
  by_rank[0].sequence = 1;
  by_rank[0].group_launches = 5;
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

TEST(CheckStatusesTest, DifferentUnitsAreNamed) {
  EXPECT_EQ(
      difference({{.kind = kLaunch, .unit = 1, .numel = 8},
                  {.kind = kLaunch, .unit = 2, .numel = 8}}),
      "expected every rank in the same place: rank 0 was to launch "
      "bucket 1 of iteration 0, 8 elements, rank 1 was to launch bucket "
      "2 of iteration 0, 8 elements.\n"
      "Run forward and backward equally often on every rank, and forwards "
      "without backward under no_grad.");
}

TEST(CheckStatusesTest, DifferentLengthsAreNamed) {
  Statuses by_rank(2,
                   {.kind = kLaunch, .iteration = 7, .unit = 2, .numel = 1024});
  by_rank[1].numel = 512;
  EXPECT_EQ(difference(by_rank),
            "expected bucket 2 of iteration 7 to have the same number of "
            "elements on every rank: rank 0 has 1024, rank 1 has 512.\n"
            "Make it a function of what all ranks know.");
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

TEST(CheckStatusesTest, DifferentNumbersOfLaunchesAreNamed) {
  Statuses by_rank(3, ended(7));
  by_rank[2].launches = 2;
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

TEST(LaunchDeficitTest, IsWhatTheFurthestRankHasMore) {
  const Statuses by_rank = {{.launches = 1}, {.launches = 3}, {}};
  EXPECT_EQ(*launch_deficit(by_rank, 0), 2);
  EXPECT_EQ(*launch_deficit(by_rank, 1), 0);
  EXPECT_EQ(*launch_deficit(by_rank, 2), 3);
}

TEST(LaunchDeficitTest, CollectivesOfOthersThatAllRanksLaunchedDoNoHarm) {
  const Statuses by_rank = {
      {.launches = 1, .own_collectives = 1, .group_launches = 6},
      {.launches = 3, .own_collectives = 3, .group_launches = 8}};
  EXPECT_EQ(*launch_deficit(by_rank, 0), 2);
}

TEST(LaunchDeficitTest, CollectivesOfOthersInBetweenCannotBePaid) {
  const Statuses by_rank = {
      {.launches = 1, .own_collectives = 1, .group_launches = 1},
      {.launches = 3, .own_collectives = 3, .group_launches = 4},
      {.launches = 3, .own_collectives = 3, .group_launches = 4}};
  const std::string expected =
      "ranks can't be brought in step: behind by 2, 0, 0 launches (by rank), "
      "but in between the group has launched 0, 1, 1 other collectives (by "
      "rank).\nMake a new process group on all ranks.";
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(launch_deficit(by_rank, rank).status().message(), expected);
  }
}

TEST(LaunchDeficitTest, EqualLaunchesWithDifferentCollectivesOfTheGroupAreOut) {
  const Statuses by_rank = {
      {.launches = 3, .own_collectives = 3, .group_launches = 3},
      {.launches = 3, .own_collectives = 3, .group_launches = 4}};
  EXPECT_FALSE(launch_deficit(by_rank, 0).ok());
}

TEST(LaunchDeficitTest, AGroupThatDoesNotCountIsBelieved) {
  const Statuses by_rank = {
      {.launches = 1, .own_collectives = 1},
      {.launches = 3, .own_collectives = 3, .group_launches = 4}};
  EXPECT_EQ(*launch_deficit(by_rank, 0), 2);
}

TEST(LaunchDeficitTest, LaunchesMayBeAnyNumberOfCollectivesEach) {
  Statuses by_rank = {
      {.launches = 3, .own_collectives = 5, .group_launches = 7},
      {.launches = 1, .own_collectives = 2, .group_launches = 4},
      {.launches = 2, .own_collectives = 2, .group_launches = 4}};
  EXPECT_EQ(*launch_deficit(by_rank, 1), 2);
  by_rank[2].own_collectives = 3;
  EXPECT_FALSE(launch_deficit(by_rank, 1).ok());
}

TEST(LaunchDeficitTest, ADebtOfAnotherPlanCannotBePaid) {
  const Statuses by_rank = {{.fingerprint = 1, .launches = 1},
                            {.fingerprint = 2, .launches = 3}};
  EXPECT_THAT(
      std::string(launch_deficit(by_rank, 1).status().message()),
      ::testing::HasSubstr("behind by 2, 0 launches (by rank), of different"));
}

TEST(LaunchDeficitTest, NothingCanBePaidWhereARankHasLostTheGroup) {
  const Statuses by_rank = {{.launches = 1}, {.launches = kLostGroup}, {}};
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(launch_deficit(by_rank, rank).status().message(),
              "ranks can't be brought in step: rank 1 can't go on with "
              "the group.\nMake a new process group on all ranks.");
  }
}

}  // namespace
}  // namespace brigade
