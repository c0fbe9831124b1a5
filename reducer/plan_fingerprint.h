// A number that is equal on ranks whose buckets travel alike: same parameters,
// lengths, strides and dtypes, in the same order.
//
// Thread safety: pure functions.

#ifndef BRIGADE_REDUCER_PLAN_FINGERPRINT_H_
#define BRIGADE_REDUCER_PLAN_FINGERPRINT_H_

#include <cstdint>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/parameter_table.h"

namespace brigade {

// The same in every process of the same build.
uint64_t plan_fingerprint(const BucketPlan& plan, const ParameterTable& table,
                          const HookTraits& hook);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PLAN_FINGERPRINT_H_
