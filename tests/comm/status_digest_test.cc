#include "brigade/comm/control/status_digest.h"

#include <algorithm>
#include <random>
#include <vector>

#include "brigade/comm/control/status_check.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using enum StatusKind;

StatusDigest digest_in(const std::vector<int>& order,
                       const std::vector<RankStatus>& by_rank) {
  StatusDigest digest = digest_of(order.front(), by_rank[order.front()]);
  for (const int rank : order) {
    digest = combine(digest, digest_of(rank, by_rank[rank]));
  }
  return digest;
}

// Equal but for one rank at most, in one thing or in none.
std::vector<RankStatus> some_statuses(std::mt19937& random) {
  RankStatus common = {
      .kind = kEnd, .iteration = 7, .unit = 1, .fingerprint = 5, .others = 9};
  common.by_group[0].launches = 2;
  std::vector<RankStatus> by_rank(2 + random() % 6, common);
  RankStatus& one = by_rank[random() % by_rank.size()];
  switch (random() % 12) {
    case 0:
      one.kind = kFailed;
      break;
    case 1:
      one.kind = kBegin;
      break;
    case 2:
      ++one.iteration;
      break;
    case 3:
      ++one.unit;
      break;
    case 4:
      ++one.by_group[kMaxGroups - 1].launches;
      break;
    case 5:
      ++one.fingerprint;
      break;
    case 6:
      ++one.by_group[0].launches;
      break;
    case 7:
      ++one.others;
      break;
    case 8:
      one.text = status_text("not compared");
      break;
    case 9:
      ++one.by_group[0].foreign;
      break;
    case 10:
      ++one.sequence;
      break;
    case 11:
      for (RankStatus& each : by_rank) each.kind = kFailed;
      break;
  }
  return by_rank;
}

TEST(StatusDigestTest, SaysWhatTheCheckOfAllSays) {
  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) {
    const std::vector<RankStatus> by_rank = some_statuses(random);
    std::vector<int> order;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      order.push_back(static_cast<int>(rank));
      order.push_back(static_cast<int>(random() % by_rank.size()));
    }
    std::ranges::shuffle(order, random);
    EXPECT_EQ(digest_in(order, by_rank).all_agree != 0,
              check_statuses(by_rank).ok());
  }
}

// Whoever is in any order, and however often.
TEST(StatusDigestTest, KnowsWhatAllHaveToldAlike) {
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    std::vector<RankStatus> by_rank(2 + random() % 6,
                                    {.kind = kEnd, .proposal = 3, .order = 4});
    const bool one_proposal = random() % 2 == 0;
    const bool one_order = random() % 2 == 0;
    if (!one_proposal) ++by_rank[random() % by_rank.size()].proposal;
    if (!one_order) ++by_rank[random() % by_rank.size()].order;
    std::vector<int> order;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      order.push_back(static_cast<int>(rank));
      order.push_back(static_cast<int>(random() % by_rank.size()));
    }
    std::ranges::shuffle(order, random);
    const StatusDigest digest = digest_in(order, by_rank);
    EXPECT_NE(digest.all_agree, 0);
    EXPECT_EQ(told_alike(digest).proposals, one_proposal);
    EXPECT_EQ(told_alike(digest).orders, one_order);
  }
}

TEST(StatusDigestTest, KeepsTheFailureOfTheLowestRank) {
  std::vector<RankStatus> by_rank(5, {.kind = kEnd});
  for (const int rank : {1, 3}) {
    by_rank[rank] = {.kind = kFailed,
                     .iteration = 7,
                     .text = status_text(rank == 1 ? "low" : "high")};
  }
  std::vector<int> order = {0, 1, 2, 3, 4};
  do {
    const auto failure = first_failure(digest_in(order, by_rank));
    ASSERT_TRUE(failure.has_value());
    EXPECT_EQ(describe(*failure), "rank 1 failed in iteration 7: low");
  } while (std::ranges::next_permutation(order).found);
}

TEST(StatusDigestTest, KeepsTheLowestRankWhereNoneHasFailed) {
  const std::vector<RankStatus> by_rank = {{.kind = kEnd, .iteration = 4},
                                           {.kind = kEnd, .iteration = 5}};
  const StatusDigest digest = digest_in({1, 0}, by_rank);
  EXPECT_EQ(digest.first.rank, 0);
  EXPECT_EQ(digest.first.rank_status.iteration, 4);
  EXPECT_FALSE(first_failure(digest).has_value());
}

}  // namespace
}  // namespace brigade
