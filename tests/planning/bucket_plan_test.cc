#include "brigade/planning/bucket_plan.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
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

TEST(BucketPlanTest, TextGivesTheBucketsBack) {
  const std::vector<std::vector<size_t>> buckets = {{2, 1}, {0}, {11, 3}};
  EXPECT_EQ(to_text(*BucketPlan::create({{2, 1}, {0}}, 3)), "[[2,1],[0]]");
  EXPECT_EQ(*parse_buckets("[[2, 1], [0], [11, 3]]"), buckets);
  for (const char* const wrong :
       {"", "[]", "[[]]", "[[1]", "[[1,]]", "[[1][2]]", "[[-1]]", "[[x]]",
        "[[1.5]]", "[[99999999999999999999]]"}) {
    EXPECT_FALSE(parse_buckets(wrong).ok()) << wrong;
  }
}

TEST(BucketPlanTest, RefusesAParameterThatIsMissing) {
  EXPECT_THAT(error_of({{0, 2}}, 3),
              HasSubstr("bucket_plan lacks parameter 1.\nList each of the 3 "
                        "parameters in exactly one bucket"));
}

TEST(BucketPlanTest, RefusesAParameterThatIsRepeated) {
  EXPECT_THAT(error_of({{0, 1}, {1}}, 2),
              HasSubstr("bucket_plan lists parameter 1 in buckets 0 and 1"));
}

TEST(BucketPlanTest, RefusesAnUnknownParameter) {
  EXPECT_THAT(error_of({{0, 7}}, 2),
              HasSubstr("lists parameter 7, but there are only 2"));
}

TEST(BucketPlanTest, RefusesAnEmptyBucketAndAnEmptyPlan) {
  EXPECT_THAT(error_of({{0}, {}}, 1),
              HasSubstr("bucket 1 of bucket_plan is empty"));
  EXPECT_THAT(error_of({}, 0), HasSubstr("at least 1 parameter, got 0"));
}

std::vector<size_t> registration_order(size_t n) {
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

BucketPlan plan_in_order(const std::vector<ParameterSpec>& parameters,
                         const std::vector<size_t>& order,
                         const std::vector<int64_t>& caps_bytes) {
  auto plan = plan_by_size(parameters, order, caps_bytes);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

std::string planning_error(const std::vector<ParameterSpec>& parameters,
                           const std::vector<size_t>& order,
                           const std::vector<int64_t>& caps_bytes) {
  return std::string(
      plan_by_size(parameters, order, caps_bytes).status().message());
}

TEST(PlanBySizeTest, FillsInReverseRegistrationOrder) {
  const std::vector<ParameterSpec> parameters(4, {.size_bytes = 4});
  EXPECT_THAT(
      plan_in_order(parameters, reverse_registration_order(4), {8}).buckets(),
      ElementsAre(ElementsAre(3, 2), ElementsAre(1, 0)));
}

TEST(PlanBySizeTest, TakesTheCapsInTurnAndRepeatsTheLast) {
  const std::vector<ParameterSpec> parameters(10, {.size_bytes = 4});
  EXPECT_THAT(
      plan_in_order(parameters, registration_order(10), {4, 8, 12}).buckets(),
      ElementsAre(ElementsAre(0), ElementsAre(1, 2), ElementsAre(3, 4, 5),
                  ElementsAre(6, 7, 8), ElementsAre(9)));
}

// Properties, over random sizes, kinds, orders and caps: each parameter is in
// one bucket (BucketPlan checks it), buckets hold one kind, members follow the
// order, a bucket without its last member is below its cap, and buckets are in
// the order in which they become full.
TEST(PlanBySizeTest, HoldsItsPropertiesOnRandomInput) {
  std::mt19937 random(20241);
  for (int round = 0; round < 300; ++round) {
    const size_t n = 1 + random() % 60;
    std::vector<ParameterSpec> parameters;
    for (size_t i = 0; i < n; ++i) {
      parameters.push_back({.size_bytes = static_cast<int64_t>(random() % 50),
                            .kind = static_cast<int>(random() % 3),
                            .sparse = random() % 9 == 0});
    }
    std::vector<size_t> order = registration_order(n);
    std::shuffle(order.begin(), order.end(), random);
    const int64_t cap_bytes = 1 + random() % 120;
    const BucketPlan plan = plan_in_order(parameters, order, {cap_bytes});

    std::vector<size_t> position(n);
    for (size_t p = 0; p < n; ++p) position[order[p]] = p;
    EXPECT_TRUE(check_bucket_kinds(plan, parameters).ok());
    size_t full_before = 0;
    for (const std::vector<size_t>& bucket : plan.buckets()) {
      int64_t bytes = 0;
      for (size_t s = 0; s < bucket.size(); ++s) {
        if (s > 0) {
          EXPECT_LT(position[bucket[s - 1]], position[bucket[s]]);
          EXPECT_LT(bytes, cap_bytes);
        }
        bytes += parameters[bucket[s]].size_bytes;
      }
      EXPECT_GE(position[bucket.back()], full_before);
      full_before = position[bucket.back()];
    }
  }
}

TEST(PlanBySizeTest, RefusesBadInput) {
  const std::vector<ParameterSpec> two(2, {.size_bytes = 4});
  EXPECT_THAT(planning_error({}, {}, {4}),
              HasSubstr("at least 1 parameter, got 0"));
  EXPECT_THAT(planning_error(two, {0, 1}, {}),
              HasSubstr("caps must not be empty"));
  EXPECT_THAT(planning_error(two, {0, 1}, {4, 0}),
              HasSubstr("bucket cap 1 must be > 0 bytes, got 0"));
  EXPECT_THAT(planning_error(two, {0, 1}, {-3}), HasSubstr("got -3"));
  EXPECT_THAT(planning_error(two, {0, 0}, {4}),
              HasSubstr("exactly one bucket"));
  EXPECT_THAT(planning_error(two, {0, 2}, {4}), HasSubstr("out of range"));
  EXPECT_THAT(planning_error(two, {0}, {4}),
              HasSubstr("2 parameters once, got 1"));
}

TEST(PlanCheckTest, RefusesMixedBuckets) {
  const std::vector<ParameterSpec> parameters = {
      {.size_bytes = 4},
      {.size_bytes = 4, .kind = 1},
      {.size_bytes = 4, .sparse = true}};
  EXPECT_THAT(std::string(check_bucket_kinds(
                              *BucketPlan::create({{0, 1}, {2}}, 3), parameters)
                              .message()),
              HasSubstr("mixes dtypes or devices: parameters 0 and 1 differ"));
  EXPECT_THAT(std::string(check_bucket_kinds(
                              *BucketPlan::create({{0, 2}, {1}}, 3), parameters)
                              .message()),
              HasSubstr("parameter 2, whose gradient is sparse"));
}

}  // namespace
}  // namespace brigade
