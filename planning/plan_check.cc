#include "brigade/planning/plan_check.h"

#include <cstddef>
#include <vector>

#include "absl/strings/str_cat.h"

namespace brigade {

absl::Status check_bucket_kinds(const BucketPlan& plan,
                                std::span<const ParameterSpec> parameters) {
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    const std::vector<size_t>& members = plan.buckets()[b];
    const ParameterSpec& first = parameters[members.front()];
    for (size_t member : members) {
      if (parameters[member].kind != first.kind) {
        return absl::InvalidArgumentError(absl::StrCat(
            "bucket ", b, " of the plan mixes dtypes or devices: parameters ",
            members.front(), " and ", member, " differ; put them apart"));
      }
      if (parameters[member].sparse && members.size() > 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("bucket ", b, " of the plan holds parameter ", member,
                         ", whose gradient is sparse, and ", members.size() - 1,
                         " more; a sparse gradient needs a bucket to itself"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace brigade
