#include "brigade/fsdp/shard_layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace brigade {
namespace shard_layout_test {

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

// All that a layout promises, by counting elements one by one.
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
      ASSERT_EQ(range.in_parameter, done) << "a gap, or out of order";
      ASSERT_LE(range.in_shard + range.numel, layout.shard_numel());
      ASSERT_EQ(rank * layout.shard_numel() + range.in_shard,
                layout.offset(p) + done)
          << "not a view of the gathered buffer";
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

TEST(ShardLayoutTest, OneElementPerRankAndOneOfPadding) {
  const ShardLayout layout({{.numel = 12}, {.numel = 3}}, 16);
  EXPECT_EQ(layout.shard_numel(), 1);
  EXPECT_EQ(layout.padding_numel(), 1);
  EXPECT_EQ(layout.range(1, 12), (ShardRange{0, 0, 1}));
  EXPECT_EQ(layout.range(0, 12), ShardRange{});
  expect_sound(layout);
}

TEST(ShardLayoutTest, RowsStayTogether) {
  // Rows of 4: a cut at 7 would be in the second one.
  const ShardLayout layout({{.numel = 2}, {.numel = 12, .block_numel = 4}}, 2);
  EXPECT_EQ(layout.shard_numel(), 8);
  EXPECT_EQ(layout.offset(1), 4);
  EXPECT_EQ(layout.range(1, 0), (ShardRange{0, 4, 4}));
  EXPECT_EQ(layout.range(1, 1), (ShardRange{4, 0, 8}));
  expect_sound(layout);
}

TEST(ShardLayoutTest, BlocksOfALongParameterDivideTheShard) {
  const ShardLayout layout({{.numel = 50, .block_numel = 5}}, 4);
  EXPECT_EQ(layout.shard_numel(), 15);
  EXPECT_EQ(layout.range(0, 3), (ShardRange{45, 0, 5}));
  expect_sound(layout);
}

TEST(ShardLayoutTest, AWholeParameterHasOneOwner) {
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

// Some offsets that cut no block, by trying them all.
bool can_be_placed(const std::vector<ShardSpec>& parameters, size_t first,
                   int64_t begin, int64_t shard_numel, int64_t whole_numel) {
  if (first == parameters.size()) return true;
  const ShardSpec& spec = parameters[first];
  for (int64_t offset = begin; offset + spec.numel <= whole_numel; ++offset) {
    bool whole = true;
    for (int64_t i = 1; i < spec.numel; ++i) {
      if ((offset + i) % shard_numel == 0 && i % spec.block_numel != 0) {
        whole = false;
      }
    }
    if (whole && can_be_placed(parameters, first + 1, offset + spec.numel,
                               shard_numel, whole_numel)) {
      return true;
    }
  }
  return false;
}

TEST(ShardNumelTest, IsMostlyTheLeastThatIsFoundByTryingAll) {
  std::mt19937 random(31);
  const auto up_to = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  int num_least = 0;
  for (int round = 0; round < 1500; ++round) {
    std::vector<ShardSpec> parameters(1 + up_to(2));
    for (ShardSpec& parameter : parameters) {
      parameter = {.numel = 1 + up_to(11), .block_numel = 1 + up_to(4)};
    }
    const int64_t num_ranks = 1 + up_to(4);
    SCOPED_TRACE(round);

    const ShardLayout layout(parameters, num_ranks);
    const int64_t chosen = layout.shard_numel();
    int64_t possible = 1;
    while (!can_be_placed(parameters, 0, 0, possible, possible * num_ranks)) {
      ++possible;
    }
    EXPECT_GE(chosen, possible);
    num_least += chosen == possible;
  }
  EXPECT_GE(num_least, 1400);
}

std::vector<ShardSpec> gpt2_block(int64_t width) {
  const int64_t norm = width;
  return {{.numel = norm},
          {.numel = norm},
          {.numel = 3 * width * width},
          {.numel = 3 * width},
          {.numel = width * width},
          {.numel = width},
          {.numel = norm},
          {.numel = norm},
          {.numel = 4 * width * width},
          {.numel = 4 * width},
          {.numel = 4 * width * width},
          {.numel = width}};
}

// As sharding lays it out: a unit for each of the 12 blocks, and one for what
// is around them. On the last number of ranks no unit is divided evenly.
TEST(ShardLayoutTest, PaddingOfAllOfGpt2Small) {
  constexpr int64_t kWidth = 768;
  std::vector<std::vector<ShardSpec>> units(12, gpt2_block(kWidth));
  units.push_back({{.numel = 50257 * kWidth},
                   {.numel = 1024 * kWidth},
                   {.numel = kWidth},
                   {.numel = kWidth}});
  for (const auto& [num_ranks, expected] :
       {std::pair(128, 0), std::pair(96, 0), std::pair(127, 12 * 125 + 23)}) {
    int64_t numel = 0;
    int64_t padding = 0;
    for (const std::vector<ShardSpec>& unit : units) {
      numel += total_numel(unit);
      padding += ShardLayout(unit, num_ranks).padding_numel();
    }
    EXPECT_EQ(numel, 124'439'808);
    EXPECT_EQ(padding, expected) << num_ranks << " ranks";
    EXPECT_LE(padding * 1000, numel);
  }
}

}  // namespace shard_layout_test
}  // namespace brigade
