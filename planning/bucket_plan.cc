#include "brigade/planning/bucket_plan.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {

absl::StatusOr<BucketPlan> BucketPlan::create(
    std::vector<std::vector<size_t>> buckets, size_t num_parameters) {
  if (num_parameters == 0) {
    return absl::InvalidArgumentError(
        "a bucket plan needs at least 1 parameter, got 0");
  }
  std::vector<VariableLocator> locators(num_parameters);
  std::vector<bool> placed(num_parameters, false);
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("bucket ", b, " of the plan is empty"));
    }
    for (size_t s = 0; s < buckets[b].size(); ++s) {
      const size_t parameter = buckets[b][s];
      if (parameter >= num_parameters) {
        return absl::InvalidArgumentError(
            absl::StrCat("bucket ", b, " of the plan lists parameter ",
                         parameter, ", but there are only ", num_parameters));
      }
      if (placed[parameter]) {
        return absl::InvalidArgumentError(
            absl::StrCat("parameter ", parameter,
                         " must be in exactly one bucket, found it in buckets ",
                         locators[parameter].bucket, " and ", b));
      }
      placed[parameter] = true;
      locators[parameter] = {.bucket = b, .slot = s};
    }
  }
  for (size_t parameter = 0; parameter < num_parameters; ++parameter) {
    if (!placed[parameter]) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", parameter,
                       " must be in exactly one bucket, found it in none"));
    }
  }
  return BucketPlan(std::move(buckets), std::move(locators));
}

BucketPlan::BucketPlan(std::vector<std::vector<size_t>> buckets,
                       std::vector<VariableLocator> locators)
    : buckets_(std::move(buckets)), locators_(std::move(locators)) {}

}  // namespace brigade
