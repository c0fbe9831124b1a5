#include "brigade/fsdp/shard_layout.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "brigade/tests/fsdp/layout_of.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace shard_layout_test {

using ::testing::HasSubstr;
using testing::layout_of;

std::string error_of(std::vector<ShardSpec> parameters, int64_t num_ranks,
                     int64_t alignment = 1) {
  return std::string(
      ShardLayout::create(std::move(parameters), num_ranks, alignment)
          .status()
          .message());
}

int64_t largest_block(const std::vector<ShardSpec>& parameters) {
  int64_t largest = 1;
  for (const ShardSpec& parameter : parameters) {
    largest =
        std::max(largest, std::min(parameter.block_numel, parameter.numel));
  }
  return largest;
}

// Elements of the rank's shard that are no padding.
int64_t held_numel(const ShardLayout& layout, int64_t rank) {
  int64_t held = 0;
  for (size_t p = 0; p < layout.parameters().size(); ++p) {
    held += layout.range(p, rank).numel;
  }
  return held;
}

TEST(ShardLayoutTest, ManyMoreRanksThanElementsHoldOneAtMost) {
  const ShardLayout layout =
      layout_of({{.numel = 10}}, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(layout.shard_numel(), 1);
  EXPECT_EQ(held_numel(layout, 9), 1);
  EXPECT_EQ(held_numel(layout, 10), 0);
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

    const RankRange owners = layout.owners(p);
    int64_t done = 0;
    for (int64_t rank = 0; rank < layout.num_ranks(); ++rank) {
      const ShardRange range = layout.range(p, rank);
      ASSERT_EQ(range.numel > 0, owners.begin <= rank && rank < owners.end);
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
  EXPECT_EQ(std::accumulate(taken.begin(), taken.end(), int64_t{0}) +
                layout.padding_numel(),
            layout.whole_numel());
  int64_t held = 0;
  for (int64_t rank = 0; rank < layout.num_ranks(); ++rank) {
    held += held_numel(layout, rank);
  }
  EXPECT_EQ(held, total_numel(layout.parameters()));
}

TEST(ShardLayoutTest, OneElementPerRankAndOneOfPadding) {
  const ShardLayout layout = layout_of({{.numel = 12}, {.numel = 3}}, 16);
  EXPECT_EQ(layout.shard_numel(), 1);
  EXPECT_EQ(layout.padding_numel(), 1);
  EXPECT_EQ(layout.owners(0), (RankRange{0, 12}));
  EXPECT_EQ(layout.owners(1), (RankRange{12, 15}));
  EXPECT_EQ(layout.range(1, 12), (ShardRange{0, 0, 1}));
  EXPECT_EQ(layout.range(0, 12), ShardRange{});
  EXPECT_EQ(held_numel(layout, 14), 1);
  EXPECT_EQ(held_numel(layout, 15), 0);
  expect_sound(layout);
}

TEST(ShardLayoutTest, ParametersFollowEachOtherWithoutPaddingBetween) {
  const ShardLayout layout =
      layout_of({{.numel = 7}, {.numel = 0}, {.numel = 1}, {.numel = 9}}, 3);
  EXPECT_EQ(layout.shard_numel(), 6);
  EXPECT_EQ(layout.padding_numel(), 1);
  EXPECT_EQ(layout.offset(1), 7);
  EXPECT_EQ(layout.offset(2), 7);
  EXPECT_EQ(layout.offset(3), 8);
  EXPECT_EQ(layout.range(0, 1), (ShardRange{6, 0, 1}));
  EXPECT_EQ(layout.range(3, 1), (ShardRange{0, 2, 4}));
  EXPECT_EQ(layout.range(3, 2), (ShardRange{4, 0, 5}));
  EXPECT_EQ(layout.owners(1), RankRange{});
  expect_sound(layout);
}

TEST(ShardLayoutTest, ShardsAreMultiplesOfTheAlignment) {
  const ShardLayout layout = layout_of({{.numel = 33}}, 4, 8);
  EXPECT_EQ(layout.shard_numel(), 16);
  EXPECT_EQ(layout.padding_numel(), 31);
}

TEST(ShardLayoutTest, ParametersWithoutElementsArePadding) {
  const ShardLayout layout = layout_of({{.numel = 0}, {.numel = 0}}, 4, 8);
  EXPECT_EQ(layout.whole_numel(), 32);
  EXPECT_EQ(layout.range(1, 3), ShardRange{});
  EXPECT_EQ(layout.owners(1), RankRange{});
}

TEST(ShardLayoutTest, RowsStayTogether) {
  // Rows of 4: a cut at 7 would be in the second one.
  const ShardLayout layout =
      layout_of({{.numel = 2}, {.numel = 12, .block_numel = 4}}, 2);
  EXPECT_EQ(layout.shard_numel(), 8);
  EXPECT_EQ(layout.offset(1), 4);
  EXPECT_EQ(layout.range(1, 0), (ShardRange{0, 4, 4}));
  EXPECT_EQ(layout.range(1, 1), (ShardRange{4, 0, 8}));
  expect_sound(layout);
}

TEST(ShardLayoutTest, BlocksOfALongParameterDivideTheShard) {
  const ShardLayout layout = layout_of({{.numel = 50, .block_numel = 5}}, 4);
  EXPECT_EQ(layout.shard_numel(), 15);
  EXPECT_EQ(layout.range(0, 3), (ShardRange{45, 0, 5}));
  expect_sound(layout);
}

TEST(ShardLayoutTest, AWholeParameterHasOneOwner) {
  const ShardLayout layout =
      layout_of({{.numel = 3},
                 {.numel = 10, .block_numel = kWholeParameter},
                 {.numel = 10, .block_numel = kWholeParameter},
                 {.numel = 1}},
                2);
  EXPECT_EQ(layout.shard_numel(), 13);
  EXPECT_EQ(layout.owners(1), (RankRange{0, 1}));
  EXPECT_EQ(layout.owners(2), (RankRange{1, 2}));
  expect_sound(layout);
}

TEST(ShardLayoutTest, OneRankHoldsAllWithoutPadding) {
  const ShardLayout layout = layout_of(
      {{.numel = 5, .block_numel = 3}, {.numel = 7, .block_numel = 4}}, 1);
  EXPECT_EQ(layout.padding_numel(), 0);
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
        parameter.block_numel = up_to(4) == 0 ? kWholeParameter : 1 + up_to(8);
      }
    }
    const int64_t num_ranks = 1 + up_to(20);
    const int64_t alignment = 1 + up_to(1) * up_to(8);
    const ShardLayout layout = layout_of(parameters, num_ranks, alignment);
    SCOPED_TRACE(round);
    expect_sound(layout);
    EXPECT_EQ(layout.shard_numel() % alignment, 0);
    const int64_t total = total_numel(parameters);
    if (!with_blocks) {
      EXPECT_LT(layout.padding_numel(),
                num_ranks * alignment + (total == 0 ? 1 : 0));
      continue;
    }
    int64_t multiple = alignment;
    for (const ShardSpec& parameter : parameters) {
      if (parameter.numel * num_ranks <= total) continue;
      multiple =
          std::lcm(multiple, std::min(parameter.block_numel, parameter.numel));
    }
    EXPECT_LT(layout.padding_numel(),
              num_ranks * (largest_block(parameters) + multiple));
  }
}

// Whether the blocks, one by one and in order, go into shards of this length.
bool blocks_fit_one_by_one(const std::vector<ShardSpec>& parameters,
                           int64_t num_ranks, int64_t shard_numel) {
  int64_t room = 0;
  for (const ShardSpec& parameter : parameters) {
    for (int64_t done = 0; done < parameter.numel;) {
      const int64_t block =
          std::min(parameter.block_numel, parameter.numel - done);
      if (block > shard_numel) return false;
      if (block > room) {
        if (num_ranks-- == 0) return false;
        room = shard_numel;
      }
      room -= block;
      done += block;
    }
  }
  return true;
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

TEST(ShardNumelTest, AgreesWithTryingEveryLengthAndOffset) {
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

    int64_t least = 0;
    while (!blocks_fit_one_by_one(parameters, num_ranks, least)) ++least;
    EXPECT_EQ(least_shard_numel(parameters, num_ranks), least);

    const int64_t chosen = choose_shard_numel(parameters, num_ranks, 1);
    int64_t possible = 0;
    for (int64_t length = 1; length <= chosen; ++length) {
      const bool placed =
          can_be_placed(parameters, 0, 0, length, length * num_ranks);
      EXPECT_EQ(place_parameters(parameters, num_ranks, length).has_value(),
                placed)
          << length;
      if (placed && possible == 0) possible = length;
    }
    EXPECT_GE(possible, least);
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

TEST(ShardLayoutTest, PaddingOfGpt2On128RanksIsBelowAThousandth) {
  for (const int64_t width : {768, 1024}) {
    const std::vector<ShardSpec> embeddings = {{.numel = 50257 * width},
                                               {.numel = 1024 * width}};
    for (const auto& unit : {gpt2_block(width), embeddings}) {
      const ShardLayout layout = layout_of(unit, 128, 8);
      EXPECT_LE(layout.padding_numel() * 1000, total_numel(unit));
    }
  }
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
      padding += layout_of(unit, num_ranks).padding_numel();
    }
    EXPECT_EQ(numel, 124'439'808);
    EXPECT_EQ(padding, expected) << num_ranks << " ranks";
    EXPECT_LE(padding * 1000, numel);
  }
}

TEST(ShardLayoutTest, FingerprintsTellLayoutsApart) {
  std::vector<ShardLayout> layouts;
  for (const int64_t num_ranks : {1, 2, 3}) {
    for (const int64_t alignment : {1, 8}) {
      layouts.push_back(layout_of({{12}, {3}}, num_ranks, alignment));
      layouts.push_back(layout_of({{3}, {12}}, num_ranks, alignment));
      layouts.push_back(layout_of({{12, 3}, {3}}, num_ranks, alignment));
      layouts.push_back(layout_of({{12}, {3}, {0}}, num_ranks, alignment));
    }
  }
  for (const ShardLayout& one : layouts) {
    for (const ShardLayout& other : layouts) {
      EXPECT_EQ(one.fingerprint() == other.fingerprint(), one == other);
    }
  }
}

TEST(ShardLayoutTest, RefusesWhatCannotBeLaidOut) {
  EXPECT_THAT(error_of({}, 2), HasSubstr("at least 1 parameter, got 0"));
  EXPECT_THAT(error_of({{1}}, 0), HasSubstr("at least 1 rank, got 0"));
  EXPECT_THAT(error_of({{1}}, 1, 0), HasSubstr("elements, got 0"));
  EXPECT_THAT(error_of({{1}, {-2}}, 1),
              HasSubstr("parameter 1 of a shard layout must have numel >= 0, "
                        "got -2"));
  EXPECT_THAT(error_of({{4, 0}}, 1),
              HasSubstr("parameter 0 of a shard layout must have block_numel "
                        ">= 1, got 0"));
  const int64_t most = int64_t{1} << 48;
  EXPECT_THAT(error_of({{most}, {1}}, 1), HasSubstr("up to parameter 1"));
  EXPECT_THAT(error_of({{most}}, most, most), HasSubstr("use fewer ranks"));
}

}  // namespace shard_layout_test
}  // namespace brigade
