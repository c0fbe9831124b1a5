#include "brigade/comm/control/exchange_rounds.h"

#include <cmath>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ExchangeRoundsTest, AreLog2RoundedUp) {
  EXPECT_EQ(num_rounds(1), 0);
  EXPECT_EQ(num_rounds(2), 1);
  EXPECT_EQ(num_rounds(3), 2);
  EXPECT_EQ(num_rounds(4), 2);
  EXPECT_EQ(num_rounds(5), 3);
  EXPECT_EQ(num_rounds(512), 9);
  EXPECT_EQ(num_rounds(513), 10);
}

TEST(ExchangeRoundsTest, SourcesAndTargetsBelongTogether) {
  for (int size = 2; size <= 70; ++size) {
    for (int rank = 0; rank < size; ++rank) {
      for (int round = 0; round < num_rounds(size); ++round) {
        const int target = target_of(rank, size, round);
        EXPECT_NE(target, rank);
        EXPECT_EQ(source_of(target, size, round), rank);
      }
    }
  }
}

TEST(ExchangeRoundsTest, AfterTheLastEveryRankKnowsOfAll) {
  for (int size = 1; size <= 70; ++size) {
    std::vector<std::set<int>> known(size);
    for (int rank = 0; rank < size; ++rank) known[rank] = {rank};
    for (int round = 0; round < num_rounds(size); ++round) {
      const std::vector<std::set<int>> before = known;
      for (int rank = 0; rank < size; ++rank) {
        known[rank].insert(before[source_of(rank, size, round)].begin(),
                           before[source_of(rank, size, round)].end());
      }
    }
    for (const std::set<int>& of_one : known) EXPECT_EQ(of_one.size(), size);
  }
}

TEST(ExchangeRoundsTest, NobodyIsToldOfARankTwice) {
  for (int size = 1; size <= 70; ++size) {
    int known = 1;
    for (int round = 0; round < num_rounds(size); ++round) {
      EXPECT_LE(num_told(size, round), known);
      known += num_told(size, round);
    }
    EXPECT_EQ(known, size);
  }
}

TEST(ExchangeRoundsTest, NeighboursAreFewAndMutual) {
  EXPECT_THAT(neighbours_of(0, 1), IsEmpty());
  EXPECT_THAT(neighbours_of(1, 2), ElementsAre(0));
  EXPECT_THAT(neighbours_of(1, 8), ElementsAre(0, 2, 3, 5, 7));
  for (int size = 2; size <= 600; ++size) {
    for (const int rank : {0, size / 2, size - 1}) {
      const std::vector<int> neighbours = neighbours_of(rank, size);
      EXPECT_LE(neighbours.size(), 2 * std::log2(size) + 2);
      for (const int peer : neighbours) {
        EXPECT_THAT(neighbours_of(peer, size), ::testing::Contains(rank));
      }
    }
  }
}

}  // namespace
}  // namespace brigade
