#include <cstdint>
#include <vector>

#include "brigade/comm/rank_mesh.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ranks_of_host_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

int number_of(const std::vector<int64_t>& host_by_rank) {
  return ranks_of_a_host(host_by_rank).value();
}

std::string error_of(const std::vector<int64_t>& host_by_rank) {
  return std::string(ranks_of_a_host(host_by_rank).status().message());
}

TEST(RanksOfHostTest, CountsThoseOfEachHost) {
  EXPECT_EQ(number_of({7}), 1);
  EXPECT_EQ(number_of({7, 7, 7}), 3);
  EXPECT_EQ(number_of({7, 7, -9, -9}), 2);
  EXPECT_EQ(number_of({7, 8, 9}), 1);
  EXPECT_EQ(number_of({1, 1, 1, 2, 2, 2, 3, 3, 3}), 3);
}

TEST(RanksOfHostTest, HostsWithUnlikeNumbersAreAnError) {
  EXPECT_THAT(error_of({7, 7, 8}),
              AllOf(HasSubstr("ranks 0, 1 on one host, rank 2 on another"),
                    HasSubstr("number of shards")));
  EXPECT_THAT(error_of({7, 8, 8}), HasSubstr("ranks 1, 2 on another"));
}

TEST(RanksOfHostTest, RanksOfAHostThatAreNotNeighboursAreAnError) {
  EXPECT_THAT(error_of({7, 8, 7, 8}),
              HasSubstr("ranks 0, 2 on one host, ranks 1, 3 on another"));
  EXPECT_THAT(error_of({7, 8, 8, 7}), HasSubstr("ranks 0, 3 on one host"));
}

TEST(RanksOfHostTest, ARankThatDoesNotKnowItsHostIsAnError) {
  EXPECT_THAT(error_of({7, 0, 7}), HasSubstr("rank 1 does not know its host"));
}

TEST(RanksOfHostTest, FindsThoseOfThisHost) {
  for (const int num_ranks : {1, 2, 4}) {
    testing::run_ranks(num_ranks, [&](const auto& group) {
      EXPECT_EQ(ranks_of_a_host(group), num_ranks);
    });
  }
}

}  // namespace
}  // namespace ranks_of_host_test
}  // namespace brigade
