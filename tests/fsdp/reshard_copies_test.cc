#include "brigade/fsdp/reshard_copies.h"

#include <random>
#include <string>
#include <vector>

#include "brigade/tests/fsdp/layout_of.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::layout_of;

// Shards by rank, in which element i of parameter p is 1000 * p + i + 1 and
// padding 0.
std::vector<std::vector<int64_t>> numbered(const ShardLayout& layout) {
  std::vector<std::vector<int64_t>> shards(
      layout.num_ranks(), std::vector<int64_t>(layout.shard_numel()));
  for (size_t p = 0; p < layout.parameters().size(); ++p) {
    for (int64_t rank = 0; rank < layout.num_ranks(); ++rank) {
      const ShardRange range = layout.range(p, rank);
      for (int64_t i = 0; i < range.numel; ++i) {
        shards[rank][range.in_shard + i] =
            static_cast<int64_t>(1000 * p) + range.in_parameter + i + 1;
      }
    }
  }
  return shards;
}

TEST(ReshardCopiesTest, FromTwoRanksToThree) {
  const std::vector<ShardSpec> parameters = {{.numel = 7}, {.numel = 3}};
  const auto copies =
      reshard_copies(layout_of(parameters, 2), layout_of(parameters, 3));
  ASSERT_TRUE(copies.ok()) << copies.status();
  EXPECT_THAT(
      *copies,
      ElementsAre(ReshardCopy{0, 0, 0, 0, 0, 4}, ReshardCopy{0, 0, 4, 1, 0, 1},
                  ReshardCopy{0, 1, 0, 1, 1, 2}, ReshardCopy{1, 1, 2, 1, 3, 1},
                  ReshardCopy{1, 1, 3, 2, 0, 2}));
}

TEST(ReshardCopiesTest, ToTheSameLayoutEachRankKeepsWhatItHas) {
  const ShardLayout layout = layout_of({{.numel = 7}, {.numel = 3}}, 2);
  const auto copies = reshard_copies(layout, layout);
  ASSERT_TRUE(copies.ok()) << copies.status();
  EXPECT_THAT(*copies, ElementsAre(ReshardCopy{0, 0, 0, 0, 0, 5},
                                   ReshardCopy{0, 1, 0, 1, 0, 2},
                                   ReshardCopy{1, 1, 2, 1, 2, 3}));
}

TEST(ReshardCopiesTest, EveryElementMovesOnceBetweenRandomLayouts) {
  std::mt19937 random(17);
  const auto up_to = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE(round);
    std::vector<ShardSpec> parameters(1 + up_to(6));
    for (ShardSpec& parameter : parameters) {
      parameter = {.numel = up_to(40), .block_numel = 1 + up_to(1) * up_to(6)};
    }
    const ShardLayout from = layout_of(parameters, 1 + up_to(9), 1 + up_to(3));
    for (ShardSpec& parameter : parameters) {
      parameter.block_numel = up_to(5) ? 1 : kWholeParameter;
    }
    const ShardLayout to = layout_of(parameters, 1 + up_to(9));

    const auto copies = reshard_copies(from, to);
    ASSERT_TRUE(copies.ok()) << copies.status();
    const auto source = numbered(from);
    std::vector<std::vector<int64_t>> target(
        to.num_ranks(), std::vector<int64_t>(to.shard_numel()));
    for (const ReshardCopy& copy : *copies) {
      ASSERT_GT(copy.numel, 0);
      for (int64_t i = 0; i < copy.numel; ++i) {
        int64_t& element = target[copy.to_rank].at(copy.to_offset + i);
        ASSERT_EQ(element, 0) << "written twice";
        element = source[copy.from_rank].at(copy.from_offset + i);
      }
    }
    EXPECT_EQ(target, numbered(to));
    EXPECT_LE(copies->size(),
              parameters.size() + from.num_ranks() + to.num_ranks());
  }
}

TEST(ReshardCopiesTest, RefusesLayoutsOfDifferentParameters) {
  const auto error_of = [](const ShardLayout& from, const ShardLayout& to) {
    return std::string(reshard_copies(from, to).status().message());
  };
  const ShardLayout one = layout_of({{4}}, 2);
  EXPECT_THAT(error_of(one, layout_of({{4}, {1}}, 2)),
              HasSubstr("cannot reshard 1 parameters into 2"));
  EXPECT_THAT(error_of(one, layout_of({{5}}, 2)),
              HasSubstr("parameter 0 of 4 elements into one of 5"));
}

}  // namespace
}  // namespace brigade
