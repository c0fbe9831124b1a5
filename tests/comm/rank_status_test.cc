#include "brigade/comm/control/rank_status.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

TEST(StatusTextTest, KeepsWhatFits) {
  for (const size_t length : {0, 1, 191, 192}) {
    const std::string words(length, 'x');
    EXPECT_EQ(words_of(status_text(words)), words);
  }
}

TEST(StatusTextTest, CutsWhatIsTooLong) {
  EXPECT_EQ(words_of(status_text(std::string(209, 'x'))),
            std::string(189, 'x') + "...");
}

TEST(StatusTextTest, CutsBetweenCharacters) {
  std::string words;
  for (int i = 0; i < 110; ++i) words += "\xC3\xA9";  // of two bytes
  EXPECT_EQ(words_of(status_text(words)), words.substr(0, 188) + "...");
  words.insert(words.begin(), 'x');
  EXPECT_EQ(words_of(status_text(words)), words.substr(0, 189) + "...");
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
  RankStatus end = {.kind = kEnd, .iteration = 7};
  end.by_group[0].launches = 1;
  EXPECT_EQ(described(end), "ended iteration 7 after 1 launch");
  end.by_group[2].launches = 2;
  EXPECT_EQ(described(end), "ended iteration 7 after 3 launches");
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

TEST(DescribeStatusTest, SurvivesAnUnknownKind) {
  EXPECT_EQ(described({.kind = static_cast<StatusKind>(99)}),
            "sent a status of unknown kind 99");
}

}  // namespace
}  // namespace brigade
