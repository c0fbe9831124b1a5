#include <string>
#include <string_view>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/status/status_channel.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace rank_status_test {

TEST(StatusTextTest, KeepsShortTexts) {
  for (const size_t length : {0, 1, 191, 192}) {
    const std::string words(length, 'x');
    EXPECT_EQ(words_of(status_text(words)), words);
  }
}

TEST(StatusTextTest, CutsLongTexts) {
  EXPECT_EQ(words_of(status_text(std::string(209, 'x'))),
            std::string(189, 'x') + "...");
}

TEST(StatusTextTest, CutsBetweenCharacters) {
  std::string words;
  for (int i = 0; i < 110; ++i) words += "\xC3\xA9";  // two bytes each
  EXPECT_EQ(words_of(status_text(words)), words.substr(0, 188) + "...");
  words.insert(words.begin(), 'x');
  EXPECT_EQ(words_of(status_text(words)), words.substr(0, 189) + "...");
}

TEST(StatusTextTest, LeavesOutAPythonStack) {
  EXPECT_EQ(words_of(status_text("ValueError: boom\n\nAt:\n  a.py(1): f\n")),
            "ValueError: boom");
}

TEST(StatusTextTest, CutsAfterALine) {
  const std::string line(150, 'x');
  EXPECT_EQ(words_of(status_text(line + '\n' + line)), line);
}

std::string described(const RankStatus& rank_status) {
  return describe_status(rank_status);
}

TEST(DescribeStatusTest, NamesTheActionOfARank) {
  using enum StatusKind;
  EXPECT_EQ(described({.kind = kBegin, .iteration = 7}), "began iteration 7");
  EXPECT_EQ(described({.kind = kEnd, .iteration = 7}), "ended iteration 7");
  EXPECT_EQ(described({.kind = kAsk,
                       .iteration = 7,
                       .text = status_text("came to a forward")}),
            "came to a forward after iteration 7");
  EXPECT_EQ(described({.kind = kChained, .iteration = 7}),
            "has launched the second collectives of iteration 7");
  EXPECT_EQ(described({.kind = kArrived, .iteration = 7}),
            "has the results of iteration 7");
  EXPECT_EQ(described({.kind = kFailed, .iteration = 7}),
            "failed in iteration 7");
  EXPECT_EQ(described({.kind = kFailed,
                       .iteration = 7,
                       .unit = 2,
                       .text = status_text("division by zero")}),
            "failed in iteration 7 at launch 2: division by zero");
}

TEST(DescribeStatusTest, NamesTheSegmentOfAStep) {
  const auto ended = [](SegmentKind kind, int64_t step) {
    return described(
        {.kind = StatusKind::kEnd, .iteration = iteration_of(kind, step)});
  };
  EXPECT_EQ(ended(SegmentKind::kForward, 1), "ended the forward of step 1");
  EXPECT_EQ(ended(SegmentKind::kLocalBackward, 2),
            "ended the backward without gradient synchronization of step 2");
  EXPECT_EQ(ended(SegmentKind::kBackward, 1 << 30),
            "ended the backward of step 1073741824");
  EXPECT_EQ(ended(SegmentKind::kWithoutData, 3), "ended step 3");
  EXPECT_EQ(ended(SegmentKind::kForward, 0), "ended construction");
}

TEST(DescribeStatusTest, HandlesAnUnknownKind) {
  EXPECT_EQ(described({.kind = static_cast<StatusKind>(99)}),
            "sent a status of unknown kind 99");
}

using enum StatusKind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Statuses = std::vector<RankStatus>;

RankStatus ended(int64_t iteration) {
  return {.kind = kEnd, .iteration = iteration};
}

RankStatus failed(int64_t iteration, std::string_view words) {
  return {.kind = kFailed, .iteration = iteration, .text = status_text(words)};
}

// Returns the text of the difference; fails if there is none.
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

TEST(CheckStatusesTest, EqualStatusesAreOk) {
  EXPECT_TRUE(check_statuses(Statuses{ended(7)}).ok());
  EXPECT_TRUE(check_statuses(Statuses(4, ended(7))).ok());
}

TEST(CheckStatusesTest, IgnoresSequenceProposalAndOrder) {
  Statuses by_rank(2, ended(7));
  by_rank[0].sequence = 1;
  by_rank[0].proposal = 5;
  by_rank[0].order = 5;
  EXPECT_TRUE(check_statuses(by_rank).ok());
}

TEST(CheckStatusesTest, NamesARankInAnotherIteration) {
  EXPECT_EQ(difference({ended(7), ended(8), ended(7), ended(7)}),
            "expected the same state on every rank: ranks 0, 2, 3 ended "
            "iteration 7, rank 1 ended iteration 8.\n"
            "Run the same number of forwards and backwards on every rank, and "
            "forwards without backward under no_grad.");
}

TEST(CheckStatusesTest, NamesARankWithANewCommHook) {
  Statuses by_rank(2, ended(1));
  by_rank[1] = {.kind = kBegin,
                .hook_at = 34,
                .iteration = 1,
                .fingerprint = 0xab,
                .text = status_text("1 bucket, 4 parameters, comm hook fp16")};
  EXPECT_EQ(difference(by_rank),
            "rank 0 ended iteration 1, rank 1 changed the comm hook (fp16) "
            "before iteration 1.\nRegister the same comm hook on every rank, "
            "before the same iteration.");
}

TEST(CheckStatusesTest, NamesDifferentPlansWithTheirDescriptions) {
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

TEST(CheckStatusesTest, NamesDifferentCalls) {
  Statuses by_rank(2, {.kind = StatusKind::kAsk,
                       .iteration = 7,
                       .fingerprint = 0xab,
                       .text = status_text("gathers all units")});
  by_rank[1].fingerprint = 0xcd;
  by_rank[1].text = status_text("began a forward");
  EXPECT_EQ(
      difference(by_rank),
      "expected the same call on every rank after iteration 7: rank 0 gathers "
      "all units, rank 1 began a forward.\nMake the same calls on all ranks, "
      "in the same order.");
}

TEST(CheckStatusesTest, AFailurePrecedesAnyDifference) {
  EXPECT_EQ(failure({ended(7), failed(8, "no memory"), ended(7)}),
            "rank 1 failed in iteration 8: no memory");
}

TEST(CheckStatusesTest, GroupsRanksWithEqualFailures) {
  EXPECT_EQ(failure({failed(7, "bad input"), failed(7, "no memory"),
                     failed(7, "bad input")}),
            "ranks 0, 2 failed in iteration 7: bad input\n"
            "rank 1 failed in iteration 7: no memory");
}

TEST(CheckStatusesTest, AFailureOfAllRanksIsAborted) {
  EXPECT_EQ(failure(Statuses(2, failed(7, "x"))),
            "ranks 0, 1 failed in iteration 7: x");
}

TEST(CheckStatusesTest, DifferentPositionsOfOtherCollectivesCloseTheGroups) {
  Statuses by_rank(2, ended(7));
  by_rank[1].others = 1;
  EXPECT_THAT(difference(by_rank),
              HasSubstr("the program's own on this group"));
  EXPECT_TRUE(must_close_groups(by_rank));
}

TEST(MustCloseGroupsTest, IfARankCannotContinue) {
  Statuses by_rank = {ended(7), failed(7, "x")};
  EXPECT_FALSE(must_close_groups(by_rank));
  by_rank[1].cannot_continue = 1;
  EXPECT_TRUE(must_close_groups(by_rank));
}

// The hash covers a complete iteration.
TEST(MustCloseGroupsTest, NotIfARankFailedBeforeItsLastLaunch) {
  Statuses by_rank = {ended(7), failed(7, "x")};
  by_rank[0].others = 1;
  EXPECT_FALSE(must_close_groups(by_rank));
}

TEST(MustCloseGroupsTest, IfZerosCouldMatchOtherCollectives) {
  Statuses by_rank = {ended(7), failed(7, "x")};
  by_rank[0].has_others = 1;
  EXPECT_TRUE(must_close_groups(by_rank));
  for (RankStatus& s : by_rank) s.kind = StatusKind::kAsk;
  EXPECT_FALSE(must_close_groups(by_rank));  // no zeros are launched
}

TEST(MustCloseGroupsTest, IfARankLaunchedWithAnotherPlan) {
  Statuses by_rank(2, ended(7));
  by_rank[1].kind = StatusKind::kBegin;
  EXPECT_TRUE(must_close_groups(by_rank));
}

}  // namespace rank_status_test
}  // namespace brigade
