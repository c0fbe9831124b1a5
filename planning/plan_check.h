// Whether a plan can be carried out: a buffer has one dtype and one device.

#ifndef BRIGADE_PLANNING_PLAN_CHECK_H_
#define BRIGADE_PLANNING_PLAN_CHECK_H_

#include <span>

#include "absl/status/status.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/planning/parameter_spec.h"

namespace brigade {

// REQUIRES: one spec per parameter of the plan.
//
// Errors:
//   InvalidArgument  a bucket mixes kinds, or holds a sparse parameter and
//                    another one.
absl::Status check_bucket_kinds(const BucketPlan& plan,
                                std::span<const ParameterSpec> parameters);

}  // namespace brigade

#endif  // BRIGADE_PLANNING_PLAN_CHECK_H_
