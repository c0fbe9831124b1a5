#include "brigade/planning/bucket_plan.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;

std::string error_of(std::vector<std::vector<size_t>> buckets,
                     size_t num_parameters) {
  return std::string(BucketPlan::create(std::move(buckets), num_parameters)
                         .status()
                         .message());
}

TEST(BucketPlanTest, LocatorsInvertBuckets) {
  const std::vector<std::vector<size_t>> buckets = {{4, 2}, {0}, {3, 1}};
  const auto plan = BucketPlan::create(buckets, 5);
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (size_t parameter = 0; parameter < 5; ++parameter) {
    const VariableLocator at = plan->locate(parameter);
    EXPECT_EQ(plan->buckets()[at.bucket][at.slot], parameter);
  }
}

TEST(BucketPlanTest, RefusesAParameterThatIsMissing) {
  EXPECT_THAT(error_of({{0, 2}}, 3),
              HasSubstr("parameter 1 must be in exactly one bucket, found it "
                        "in none"));
}

TEST(BucketPlanTest, RefusesAParameterThatIsRepeated) {
  EXPECT_THAT(error_of({{0, 1}, {1}}, 2),
              HasSubstr("parameter 1 must be in exactly one bucket, found it "
                        "in buckets 0 and 1"));
}

TEST(BucketPlanTest, RefusesAnUnknownParameter) {
  EXPECT_THAT(error_of({{0, 7}}, 2),
              HasSubstr("lists parameter 7, but there are only 2"));
}

TEST(BucketPlanTest, RefusesAnEmptyBucketAndAnEmptyPlan) {
  EXPECT_THAT(error_of({{0}, {}}, 1),
              HasSubstr("bucket 1 of the plan is empty"));
  EXPECT_THAT(error_of({}, 0), HasSubstr("at least 1 parameter, got 0"));
}

}  // namespace
}  // namespace brigade
