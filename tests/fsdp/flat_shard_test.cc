#include "brigade/fsdp/flat_shard.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace brigade {
namespace flat_shard_test {

constexpr int64_t kWhole = std::numeric_limits<int64_t>::max();

int64_t largest_block(const std::vector<ShardSpec>& parameters) {
  int64_t largest = 1;
  for (const ShardSpec& parameter : parameters) {
    largest =
        std::max(largest, std::min(parameter.block_numel, parameter.numel));
  }
  return largest;
}

int64_t total_numel(const std::vector<ShardSpec>& parameters) {
  int64_t total = 0;
  for (const ShardSpec& parameter : parameters) total += parameter.numel;
  return total;
}

// Checks every promise of a layout element by element.
void expect_sound(const ShardLayout& layout) {
  std::vector<int> taken(layout.whole_numel());
  int64_t end = 0;
  for (size_t p = 0; p < layout.parameters().size(); ++p) {
    const ShardSpec& spec = layout.parameters()[p];
    ASSERT_GE(layout.offset(p), end) << "parameter " << p << " overlaps";
    end = layout.offset(p) + spec.numel;
    ASSERT_LE(end, layout.whole_numel());

    int64_t done = 0;
    for (int64_t rank = 0; rank < layout.num_ranks(); ++rank) {
      const ShardRange range = layout.range(p, rank);
      if (range.numel == 0) {
        ASSERT_EQ(range, ShardRange{});
        continue;
      }
      ASSERT_EQ(range.in_parameter, done) << "a gap, or wrong order";
      ASSERT_LE(range.in_shard + range.numel, layout.shard_numel());
      ASSERT_EQ(rank * layout.shard_numel() + range.in_shard,
                layout.offset(p) + done)
          << "not a view of the unsharded buffer";
      for (int64_t i = 0; i < range.numel; ++i) {
        ++taken[layout.offset(p) + done + i];
      }
      done += range.numel;
      if (done < spec.numel) {
        ASSERT_EQ(done % spec.block_numel, 0) << "a block is cut";
      }
    }
    ASSERT_EQ(done, spec.numel);
  }
  EXPECT_TRUE(std::ranges::all_of(taken, [](int times) { return times <= 1; }));
  EXPECT_EQ(std::ranges::count(taken, 0), layout.padding_numel());
}

TEST(ShardLayoutTest, BlocksAreNotCut) {
  // Without blocks the cut would be at element 7, inside the second row of 4.
  const ShardLayout layout({{.numel = 2}, {.numel = 12, .block_numel = 4}}, 2);
  EXPECT_EQ(layout.shard_numel(), 8);
  EXPECT_EQ(layout.offset(1), 4);
  EXPECT_EQ(layout.range(1, 0), (ShardRange{0, 4, 4}));
  EXPECT_EQ(layout.range(1, 1), (ShardRange{4, 0, 8}));
  expect_sound(layout);
}

TEST(ShardLayoutTest, AParameterOfOneBlockIsOnOneRank) {
  const ShardLayout layout({{.numel = 3},
                            {.numel = 10, .block_numel = kWhole},
                            {.numel = 10, .block_numel = kWhole},
                            {.numel = 1}},
                           2);
  EXPECT_EQ(layout.shard_numel(), 13);
  EXPECT_EQ(layout.range(1, 0).numel, 10);
  EXPECT_EQ(layout.range(2, 1).numel, 10);
  expect_sound(layout);
}

TEST(ShardLayoutTest, RandomLayoutsAreSoundAndTheirPaddingIsBounded) {
  std::mt19937 random(13);
  const auto up_to = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  for (int round = 0; round < 4000; ++round) {
    std::vector<ShardSpec> parameters(1 + up_to(6));
    const bool with_blocks = round % 2;
    for (ShardSpec& parameter : parameters) {
      parameter.numel = up_to(3) == 0 ? up_to(1) : up_to(60);
      if (with_blocks && up_to(1)) {
        parameter.block_numel = up_to(4) == 0 ? kWhole : 1 + up_to(8);
      }
    }
    const int64_t num_ranks = 1 + up_to(20);
    const ShardLayout layout(parameters, num_ranks);
    SCOPED_TRACE(round);
    expect_sound(layout);
    const int64_t total = total_numel(parameters);
    if (!with_blocks) {
      EXPECT_LT(layout.padding_numel(), num_ranks + (total == 0 ? 1 : 0));
      continue;
    }
    int64_t multiple = 1;
    for (const ShardSpec& parameter : parameters) {
      if (parameter.numel * num_ranks <= total) continue;
      multiple =
          std::lcm(multiple, std::min(parameter.block_numel, parameter.numel));
    }
    EXPECT_LT(layout.padding_numel(),
              num_ranks * (largest_block(parameters) + multiple));
  }
}

}  // namespace flat_shard_test
}  // namespace brigade
