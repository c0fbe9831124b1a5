#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "brigade/comm/ordered/ordered_collectives.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

TEST(RankSliceTest, SlicesAreContiguousAndDifferByAtMostOne) {
  for (int world_size = 1; world_size <= 9; ++world_size) {
    for (int64_t numel = 0; numel <= 40; ++numel) {
      int64_t end = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        const RankSlice slice = slice_of_rank(numel, rank, world_size);
        EXPECT_EQ(slice.offset, end);
        EXPECT_GE(slice.numel, numel / world_size);
        EXPECT_LE(slice.numel, (numel + world_size - 1) / world_size);
        end += slice.numel;
      }
      EXPECT_EQ(end, numel);
    }
  }
}

at::Tensor sum(const std::vector<at::Tensor>& terms,
               std::optional<double> scale = std::nullopt) {
  const at::Tensor out = at::empty_like(terms[0]);
  ordered_sum(terms, scale, out);
  return out;
}

std::vector<at::Tensor> scalars(const std::vector<double>& values,
                                at::ScalarType dtype) {
  std::vector<at::Tensor> terms;
  for (const double value : values) {
    terms.push_back(at::full({1}, value, dtype));
  }
  return terms;
}

TEST(OrderedSumTest, SumsInOrder) {
  EXPECT_EQ(sum(scalars({1e8, 1, -1e8}, at::kFloat)).item<float>(), 0);
  EXPECT_EQ(sum(scalars({1e8, -1e8, 1}, at::kFloat)).item<float>(), 1);
}

// float16 has no 2049: with rounding after each term, the ones would be lost.
TEST(OrderedSumTest, HalfPrecisionIsRoundedOnce) {
  const auto terms = scalars({2048, 1, 1, 1}, at::kHalf);
  EXPECT_EQ(sum(terms).item<float>(), 2052);  // 2051 rounded to even
  EXPECT_EQ(sum(scalars({256, 1, 1}, at::kBFloat16)).item<float>(), 258);
}

TEST(OrderedSumTest, ScalesTheSumOnce) {
  const auto terms = scalars({1e38, 2e38, -1.5e38}, at::kFloat);
  EXPECT_EQ(sum(terms, 1.0 / 3).item<float>(),
            static_cast<float>(1e38F + 2e38F - 1.5e38F) *
                static_cast<float>(1.0 / 3));
}

TEST(OrderedSumTest, IntegersWrap) {
  EXPECT_EQ(sum(scalars({127, 1}, at::kChar)).item<int>(), -128);
  const at::Tensor largest =
      at::full({1}, std::numeric_limits<int64_t>::max(), at::kLong);
  EXPECT_EQ(sum({largest, at::ones({1}, at::kLong)}).item<int64_t>(),
            std::numeric_limits<int64_t>::min());
}

TEST(OrderedSumTest, KeepsANegativeZero) {
  EXPECT_TRUE(
      std::signbit(sum(scalars({-0.0, -0.0}, at::kFloat)).item<float>()));
}

class OrderedSumDtypeTest : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(
    Dtypes, OrderedSumDtypeTest,
    ::testing::Values(at::kFloat, at::kDouble, at::kComplexFloat,
                      at::kComplexDouble, at::kLong, at::kInt, at::kShort,
                      at::kChar, at::kByte),
    [](const auto& dtype) { return c10::toString(dtype.param); });

// Lengths around the block size; the output may be one of the terms.
TEST_P(OrderedSumDtypeTest, EqualsAdditionsOfVectors) {
  ASSERT_TRUE(can_add(GetParam()));
  at::manual_seed(1);
  for (const int64_t numel : {0, 1, 5, 1023, 1024, 1025, 5000}) {
    std::vector<at::Tensor> terms;
    for (int i = 0; i < 5; ++i) {
      terms.push_back((at::randn({numel}) * 100).to(GetParam()));
    }
    at::Tensor expected = terms[0].clone();
    for (int i = 1; i < 5; ++i) expected.add_(terms[i]);
    EXPECT_TRUE(at::equal(sum(terms), expected)) << numel;
    ordered_sum(terms, std::nullopt, terms[2]);
    EXPECT_TRUE(at::equal(terms[2], expected)) << numel;
  }
}

TEST(OrderedSumTest, RejectsBool) { EXPECT_FALSE(can_add(at::kBool)); }

}  // namespace
}  // namespace brigade
