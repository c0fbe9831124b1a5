#include "brigade/bucket_sweep/quantiles.h"

#include "gtest/gtest.h"

namespace brigade {
namespace {

TEST(QuantilesTest, InterpolatesBetweenSamplesInAnyOrder) {
  const Quartiles found = quartiles({40, 10, 30, 20});
  EXPECT_EQ(found.p25, 17.5);
  EXPECT_EQ(found.median, 25);
  EXPECT_EQ(found.p75, 32.5);
}

TEST(QuantilesTest, ExtremesAreSamples) {
  EXPECT_EQ(quantile({5, 1, 9}, 0), 1);
  EXPECT_EQ(quantile({5, 1, 9}, 1), 9);
}

TEST(QuantilesTest, OneSampleIsEveryQuantile) {
  const Quartiles found = quartiles({7});
  EXPECT_EQ(found.p25, 7);
  EXPECT_EQ(found.p75, 7);
}

}  // namespace
}  // namespace brigade
