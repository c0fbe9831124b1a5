// Rank numbers in errors, and the number of ranks on a host.

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace rank_numbers_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(RankNamesTest, OfASubgroupAreThoseOfTheWholeGroup) {
  run_ranks(4, [](const Group& group) {
    EXPECT_EQ(RankNames::of(*group)[3], 3);
    EXPECT_EQ(RankNames::of(*group).describe(1, 4), "rank 1 of 4");
    if (group->getRank() == 0) {
      make_subgroup(group, {0});
      return;
    }
    const GroupScope part = make_subgroup(group, {1, 2, 3});
    const RankNames names = RankNames::of(*part.group());
    EXPECT_EQ(names[0], 1);
    EXPECT_EQ(names.describe(0, 3), "rank 1, of ranks 1, 2, 3");
    if (group->getRank() == 1) {
      make_subgroup(part.group(), {0});
      return;
    }
    const GroupScope inner = make_subgroup(part.group(), {1, 2});
    EXPECT_EQ(RankNames::of(*inner.group()).describe(1, 2),
              "rank 3, of ranks 2, 3");
  });
}

// The second rank of each pair leaves.
TEST(RankNamesTest, AppearInErrors) {
  run_ranks(4, [](const Group& group) {
    const int first = group->getRank() / 2 * 2;
    const GroupScope pair = make_subgroup(group, {first, first + 1});
    OrderedCollectives collectives(pair.group());
    if (pair.group()->getRank() == 1) return;
    const auto reduced = collectives.all_reduce(at::ones({4}));
    reduced->wait();
    ASSERT_TRUE(reduced->hasError());
    EXPECT_THAT(
        message_of(reduced->exception_ptr()),
        AllOf(HasSubstr(absl::StrCat("ordered collectives on rank ", first,
                                     ", of ranks ", first, ", ", first + 1)),
              HasSubstr(absl::StrCat("rank ", first + 1, " "))));
  });
}

std::string error_of(const std::vector<int64_t>& host_by_rank) {
  try {
    ranks_of_a_host(host_by_rank);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(RanksOfHostTest, CountsTheRanksOfEachHost) {
  EXPECT_EQ(ranks_of_a_host({7}), 1);
  EXPECT_EQ(ranks_of_a_host({7, 7, 7}), 3);
  EXPECT_EQ(ranks_of_a_host({7, 8, 9}), 1);
  EXPECT_EQ(ranks_of_a_host({7, 7, 7, -9, -9, -9, 3, 3, 3}), 3);
}

TEST(RanksOfHostTest, RejectsUnequalOrInterleavedHosts) {
  EXPECT_THAT(error_of({7, 7, 8}),
              AllOf(HasSubstr("ranks 0, 1 on one host, rank 2 on another"),
                    HasSubstr("number of shards")));
  EXPECT_THAT(error_of({7, 8, 8}), HasSubstr("ranks 1, 2 on another"));
  EXPECT_THAT(error_of({7, 8, 7, 8}),
              HasSubstr("ranks 0, 2 on one host, ranks 1, 3 on another"));
  EXPECT_THAT(error_of({7, 0, 7}), HasSubstr("no host identity on rank 1"));
}

TEST(RanksOfHostTest, CountsTheRanksOfThisHost) {
  for (const int num_ranks : {1, 2, 4}) {
    run_ranks(num_ranks, [&](const Group& group) {
      EXPECT_EQ(ranks_of_a_host(group), num_ranks);
    });
  }
}

}  // namespace rank_numbers_test
}  // namespace brigade
