#include <ATen/ops/ones.h>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/subgroup.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace rank_names_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(RankNamesTest, OfAPartAreThoseOfTheWhole) {
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

// A rank that stays has rank 2 * row + 1 beside it, which leaves.
TEST(RankNamesTest, AreThoseOfErrors) {
  run_ranks(4, [](const Group& group) {
    const int first = group->getRank() / 2 * 2;
    const GroupScope row = make_subgroup(group, {first, first + 1});
    OrderedCollectives collectives(row.group());
    if (row.group()->getRank() == 1) return;
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

}  // namespace rank_names_test
}  // namespace brigade
