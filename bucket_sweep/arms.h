// The bucket sizes that a sweep tries.
//
// Thread safety: pure functions.

#ifndef BRIGADE_BUCKET_SWEEP_ARMS_H_
#define BRIGADE_BUCKET_SWEEP_ARMS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace brigade {

struct BucketArm {
  std::string label;
  std::vector<int64_t> caps_bytes;  // ReducerOptions::bucket_caps_bytes
};

// What a reducer does if nobody says anything.
BucketArm default_arm();

// "0.25": buckets of so many MiB; "one" bucket for all parameters; one for
// "each". Errors: ValueError if it is none of these.
BucketArm arm_of(std::string_view cap);
std::vector<BucketArm> arms_of(const std::vector<std::string>& caps);

// One per parameter, 0.25 to 100 MiB, and one for all.
std::vector<BucketArm> usual_arms();

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_ARMS_H_
