// A plan with the buckets that carry it out, and the sequence of collectives
// that they and the used map make.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_BOUND_PLAN_H_
#define BRIGADE_REDUCER_BOUND_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/bucket.h"
#include "brigade/reducer/bucket_memory.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/parameter_table.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/reducer/statistics.h"
#include "brigade/reducer/used_parameters.h"

namespace brigade {

struct BoundPlan {
  BucketPlan plan;
  std::vector<Bucket> buckets;
  std::vector<Collective*> sequence;  // the buckets, and the used map
  size_t first_bucket = 0;            // its place there; the others follow
  uint64_t fingerprint = 0;  // equal on ranks that launch the same lengths
};

// `used`: null if nobody asks which parameters have gradients. `memory`: where
// buckets list what they allocate later. REQUIRES: all but `plan` and `options`
// outlive what is returned.
BoundPlan bind_plan(BucketPlan plan, const ParameterTable& table,
                    const HookTraits& hook, const ReducerOptions& options,
                    UsedParameters* used, MemoryRanges& memory,
                    ReducerStatistics& statistics);

// Equal on ranks whose buckets travel alike: the same parameters, lengths,
// strides and wire dtypes in the same order. The same in every process of the
// same build.
uint64_t plan_fingerprint(const BucketPlan& plan, const ParameterTable& table,
                          const HookTraits& hook);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BOUND_PLAN_H_
