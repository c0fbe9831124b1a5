#include "brigade/comm/rank_status.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

TEST(StatusTextTest, KeepsWhatFits) {
  for (const size_t length : {0, 1, 175, 176}) {
    const std::string words(length, 'x');
    EXPECT_EQ(words_of(status_text(words)), words);
  }
}

TEST(StatusTextTest, CutsWhatIsTooLong) {
  EXPECT_EQ(words_of(status_text(std::string(177, 'x'))),
            std::string(173, 'x') + "...");
}

TEST(StatusTextTest, CutsBetweenCharacters) {
  std::string words;
  for (int i = 0; i < 100; ++i) words += "\xC3\xA9";  // of two bytes
  EXPECT_EQ(words_of(status_text(words)), words.substr(0, 172) + "...");
  words.insert(words.begin(), 'x');
  EXPECT_EQ(words_of(status_text(words)), words.substr(0, 173) + "...");
}

std::string described(const RankStatus& rank_status) {
  return describe_status(rank_status);
}

TEST(DescribeStatusTest, SaysWhatARankDid) {
  using enum StatusKind;
  EXPECT_EQ(described({.kind = kIdle, .iteration = 7}),
            "ran no backward in iteration 7");
  EXPECT_EQ(described({.kind = kIdle, .iteration = 7, .unit = 0}),
            "ran no backward in iteration 7 and is behind another forward");
  EXPECT_EQ(described({.kind = kBegin, .iteration = 7}), "began iteration 7");
  EXPECT_EQ(described({.kind = kEnd, .iteration = 7, .launches = 3}),
            "ended iteration 7 after 3 launches");
  EXPECT_EQ(described({.kind = kEnd, .iteration = 7, .launches = 1}),
            "ended iteration 7 after 1 launch");
  EXPECT_EQ(
      described({.kind = kLaunch, .iteration = 7, .unit = 2, .numel = 1024}),
      "was to launch bucket 2 of iteration 7, 1024 elements");
  EXPECT_EQ(described({.kind = kLaunch, .iteration = 7, .numel = 1}),
            "was to launch a collective of iteration 7, 1 elements");
  EXPECT_EQ(described({.kind = kFailed, .iteration = 7}),
            "failed in iteration 7");
  EXPECT_EQ(described({.kind = kFailed,
                       .iteration = 7,
                       .unit = 2,
                       .text = status_text("division by zero")}),
            "failed in iteration 7 at bucket 2: division by zero");
}

TEST(DescribeStatusTest, CallsAUnitWhatTheCallerCallsIt) {
  EXPECT_EQ(describe_status({.kind = StatusKind::kFailed, .unit = 2}, "layer"),
            "failed in iteration 0 at layer 2");
}

TEST(DescribeStatusTest, SurvivesAnUnknownKind) {
  EXPECT_EQ(described({.kind = static_cast<StatusKind>(99)}),
            "sent a rank_status of unknown kind 99");
}

}  // namespace
}  // namespace brigade
