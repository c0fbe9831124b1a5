#include "brigade/comm/agreement.h"

#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::SizeIs;
using ::testing::StartsWith;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Items = std::vector<std::string>;

// Returns each rank's ValueError, or "" if it agreed.
std::vector<std::string> comparisons(
    const std::vector<Items>& items_of,
    const std::vector<absl::Status>& status_of = {}) {
  const int world_size = static_cast<int>(items_of.size());
  std::vector<std::string> texts(world_size);
  run_ranks(world_size, [&](Group group) {
    const int rank = group->getRank();
    try {
      require_agreement(group, "Reducer: parameter", items_of[rank],
                        status_of.empty() ? absl::OkStatus() : status_of[rank]);
    } catch (const c10::ValueError& error) {
      texts[rank] = error.what_without_backtrace();
    }
    // The group still works after any result.
    std::vector<at::Tensor> one = {at::ones(1)};
    group->allreduce(one)->wait();
    EXPECT_EQ(one[0].item<int>(), world_size);
  });
  return texts;
}

Items numbered(size_t count) {
  Items items;
  for (size_t i = 0; i < count; ++i) {
    items.push_back("'layer." + std::to_string(i) +
                    ".weight': float32, shape [10, 20]");
  }
  return items;
}

TEST(AgreementTest, EqualItemsAgree) {
  for (int world_size : {1, 2, 3, 4}) {
    EXPECT_THAT(comparisons(std::vector<Items>(world_size, numbered(5))),
                Each(""));
  }
  EXPECT_THAT(comparisons({{}, {}}), Each(""));
}

TEST(AgreementTest, NamesTheItemAndEachRanksValue) {
  Items other = numbered(7);
  other[3] = "'layer.3.weight': float32, shape [20, 10]";
  const auto texts = comparisons({numbered(7), other, numbered(7), other});
  EXPECT_THAT(
      texts, Each("Reducer: parameter 'layer.3.weight' differs between ranks:\n"
                  "  ranks 0, 2: float32, shape [10, 20]\n"
                  "  ranks 1, 3: float32, shape [20, 10]\n"
                  "Construct the same module on every rank."));
}

TEST(AgreementTest, NamesTheFirstOfSeveralDifferences) {
  for (size_t first : {0, 1, 49, 98, 99}) {
    Items other = numbered(100);
    for (size_t i = first; i < 100; i += 7) other[i] = "other";
    EXPECT_THAT(comparisons({numbered(100), other}),
                Each(HasSubstr("parameter " + std::to_string(first) +
                               " differs between ranks:\n  rank 0: 'layer.")));
  }
}

TEST(AgreementTest, NamesCountsThatDiffer) {
  EXPECT_THAT(comparisons({numbered(2), numbered(3), numbered(2)}),
              Each("Reducer: parameter 2 differs between ranks:\n"
                   "  ranks 0, 2: none\n"
                   "  rank 1: 'layer.2.weight': float32, shape [10, 20]\n"
                   "ranks 0, 2 have 2, rank 1 has 3 parameters.\n"
                   "Construct the same module on every rank."));
  EXPECT_THAT(
      comparisons({{}, numbered(1)}),
      Each(HasSubstr("parameter 0 differs between ranks:\n  rank 0: none")));
}

TEST(AgreementTest, SeparatesItems) {
  EXPECT_THAT(
      comparisons({{"ab", "c"}, {"a", "bc"}}),
      Each(HasSubstr("parameter 0 differs between ranks:\n  rank 0: ab\n"
                     "  rank 1: a\n")));
}

TEST(AgreementTest, AFailureOfOneRankReachesAll) {
  EXPECT_THAT(
      comparisons({numbered(3), numbered(3), numbered(3)},
                  {absl::OkStatus(), absl::InvalidArgumentError("no parameter"),
                   absl::OkStatus()}),
      Each("rank 1: no parameter"));
}

TEST(AgreementTest, DifferentFailuresAreAllNamed) {
  EXPECT_THAT(comparisons({{}, {}, {}}, {absl::InvalidArgumentError("a"),
                                         absl::InvalidArgumentError("b"),
                                         absl::InvalidArgumentError("a")}),
              Each("ranks 0, 2: a\nrank 1: b"));
}

TEST(AgreementTest, ACommonFailureNamesNoRank) {
  EXPECT_THAT(comparisons({{}, {}}, {absl::InvalidArgumentError("all bad"),
                                     absl::InvalidArgumentError("all bad")}),
              Each("all bad"));
}

TEST(AgreementTest, CutsLongTexts) {
  const std::string x(5000, 'x');
  const std::string y(5000, 'y');
  for (const std::string& text : comparisons({{x}, {y}})) {
    EXPECT_THAT(text, AllOf(HasSubstr("xxx..."), HasSubstr("yyy...")));
    EXPECT_LT(text.size(), 4500);
  }
}

TEST(AgreementTest, AWorldOfOneThrowsItsStatus) {
  const Group group = single_process_group();
  require_agreement(group, "Reducer: parameter", numbered(2), absl::OkStatus());
  EXPECT_THROW(require_agreement(group, "Reducer: parameter", numbered(2),
                                 absl::InvalidArgumentError("bad")),
               c10::ValueError);
}

TEST(AgreementTest, CostsOneSmallAllGatherIfAllAgree) {
  RecordingGroup recording(4, 2);
  require_agreement(recording.group(), "Reducer: parameter", numbered(8000),
                    absl::OkStatus());
  ASSERT_THAT(recording.log(), SizeIs(1));
  EXPECT_EQ(recording.log()[0].type, c10d::OpType::ALLGATHER);
  EXPECT_EQ(recording.log()[0].bytes, 24);
}

TEST(AgreementTest, AFailedCollectiveIsAPeerError) {
  RecordingGroup recording(3, 1);
  recording.fail_at_completion(
      0, std::make_exception_ptr(std::runtime_error("Connection closed")));
  try {
    require_agreement(recording.group(), "Reducer: parameter", numbered(1),
                      absl::OkStatus());
    FAIL() << "nothing was thrown";
  } catch (const PeerError& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                StartsWith("rank 1 of 3 could not compare its parameters with "
                           "the other ranks': Connection closed."));
  }
}

}  // namespace
}  // namespace brigade
