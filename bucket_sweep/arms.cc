#include "brigade/bucket_sweep/arms.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "brigade/planning/plan_by_size.h"

namespace brigade {
namespace {

constexpr double kBytesPerMib = 1024.0 * 1024.0;
constexpr double kLargestMib = 1e6;

}  // namespace

BucketArm default_arm() {
  return {.label = "default",
          .caps_bytes = {kDefaultBucketCapsBytes.begin(),
                         kDefaultBucketCapsBytes.end()}};
}

BucketArm arm_of(std::string_view cap) {
  if (cap == "each") return {.label = "one per parameter", .caps_bytes = {1}};
  if (cap == "one") {
    return {.label = "one",
            .caps_bytes = {std::numeric_limits<int64_t>::max()}};
  }
  double mib = 0;
  const bool is_number =
      absl::SimpleAtod(absl::string_view(cap.data(), cap.size()), &mib);
  TORCH_CHECK_VALUE(
      is_number && mib > 0 && mib <= kLargestMib,
      "arm_of: expected a size in MiB above 0, 'one' or 'each', got '",
      std::string(cap), "'.\nGive a number such as 1 or 25.");
  const auto bytes = static_cast<int64_t>(mib * kBytesPerMib);
  return {.label = absl::StrCat(mib, " MiB"),
          .caps_bytes = {std::max<int64_t>(1, bytes)}};
}

std::vector<BucketArm> arms_of(const std::vector<std::string>& caps) {
  std::vector<BucketArm> arms;
  for (const std::string& cap : caps) arms.push_back(arm_of(cap));
  return arms;
}

std::vector<BucketArm> usual_arms() {
  return arms_of({"each", "0.25", "1", "4", "10", "25", "100", "one"});
}

}  // namespace brigade
