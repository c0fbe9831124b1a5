#include "brigade/fsdp/checkpoint/shard_index.h"

#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ShardIndex sample() {
  return {.id = "04c1e0f1a2b3d",
          .num_files = 3,
          .world_size = 6,
          .tensors = {{.name = "a \"name\" é",
                       .dtype = "F32",
                       .shape = {4, 3},
                       .strides = {3, 1},
                       .chunks = {{{0, 0, 7}, {2, 7, 5}}}},
                      {.name = "none",
                       .dtype = "BF16",
                       .shape = {0, 3},
                       .strides = {3, 1},
                       .chunks = std::vector<ShardChunk>{}},
                      {.name = "step",
                       .dtype = "I64",
                       .shape = {},
                       .strides = {},
                       .chunks = std::nullopt}}};
}

TEST(ShardIndexTest, ComesBackFromItsText) {
  const auto parsed = parse_shard_index(format_shard_index(sample()));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, sample());
}

TEST(ShardIndexTest, PiecesCoverARangeOnce) {
  std::mt19937 random(1);
  const auto draw = [&](int64_t below) {
    return std::uniform_int_distribution<int64_t>(0, below - 1)(random);
  };
  for (int round = 0; round < 2'000; ++round) {
    IndexedTensor tensor;
    tensor.chunks.emplace();
    std::vector<std::pair<int64_t, int64_t>> places;  // by element
    for (int64_t file = 0; file < 1 + draw(5); ++file) {
      const ShardChunk chunk = {.file = file,
                                .begin = static_cast<int64_t>(places.size()),
                                .numel = 1 + draw(4)};
      for (int64_t i = 0; i < chunk.numel; ++i) places.emplace_back(file, i);
      tensor.chunks->push_back(chunk);
    }
    const int64_t begin = draw(places.size() + 1);
    const int64_t numel = draw(static_cast<int64_t>(places.size()) - begin + 1);
    int64_t done = 0;
    for (const ChunkPiece& piece : pieces_of(tensor, begin, numel)) {
      EXPECT_EQ(piece.in_range, done);
      EXPECT_GT(piece.numel, 0);
      for (int64_t i = 0; i < piece.numel; ++i, ++done) {
        EXPECT_EQ(places[begin + done],
                  std::pair(piece.chunk.file, piece.in_chunk + i));
      }
    }
    EXPECT_EQ(done, numel);
  }
}

TEST(ShardIndexTest, ARangeInsideOfAChunkIsOnePiece) {
  EXPECT_THAT(
      pieces_of(sample().tensors[0], 8, 2),
      ElementsAre(ChunkPiece{
          .chunk = {2, 7, 5}, .in_chunk = 1, .in_range = 0, .numel = 2}));
}

std::string error_of(ShardIndex index) {
  return std::string(
      parse_shard_index(format_shard_index(index)).status().message());
}

TEST(ShardIndexTest, ChunksThatDoNotCoverTheTensorAreErrors) {
  for (const std::vector<ShardChunk>& chunks :
       {std::vector<ShardChunk>{{0, 0, 6}, {2, 7, 5}},  // a hole
        {{0, 0, 7}, {2, 6, 6}},                         // twice
        {{0, 0, 7}, {3, 7, 5}},                         // no such file
        {{0, 0, 7}, {-1, 7, 5}},
        {{0, 0, 12}, {1, 12, 0}},  // empty
        {{0, 0, 7}, {2, 7, 6}}}) {
    ShardIndex index = sample();
    index.tensors[0].chunks = chunks;
    EXPECT_THAT(error_of(index), HasSubstr("do not follow each other"));
  }
  ShardIndex index = sample();
  index.tensors[0].chunks->pop_back();
  EXPECT_THAT(error_of(index), HasSubstr("has 7 elements"));
}

TEST(ShardIndexTest, OtherContradictionsAreErrors) {
  ShardIndex index = sample();
  index.tensors[1].name = index.tensors[0].name;
  EXPECT_THAT(error_of(index), HasSubstr("twice"));
  index = sample();
  index.tensors[0].strides = {1};
  EXPECT_THAT(error_of(index), HasSubstr("no shape"));
  index = sample();
  index.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_THAT(error_of(index), HasSubstr("no shape"));
  index = sample();
  index.num_files = 7;
  EXPECT_THAT(error_of(index), HasSubstr("names 7 files of 6 ranks"));
}

TEST(ShardIndexTest, EveryTruncationIsAnError) {
  const std::string text = format_shard_index(sample());
  for (size_t length = 0; length < text.size(); ++length) {
    EXPECT_FALSE(parse_shard_index(text.substr(0, length)).ok()) << length;
  }
  for (const char* other : {"null", "[]", "{}", "{\"id\": 3}", "\"text\""}) {
    EXPECT_THAT(std::string(parse_shard_index(other).status().message()),
                HasSubstr("cannot be read"));
  }
}

}  // namespace
}  // namespace brigade
