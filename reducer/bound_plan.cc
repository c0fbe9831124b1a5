#include "brigade/reducer/bound_plan.h"

#include <utility>

#include "brigade/reducer/plan_fingerprint.h"

namespace brigade {

BoundPlan bind_plan(BucketPlan plan, const ParameterTable& table,
                    const HookTraits& hook, const ReducerOptions& options,
                    UsedParameters* used, MemoryRanges& memory,
                    ReducerStatistics& statistics) {
  std::vector<Bucket> buckets;
  buckets.reserve(plan.num_buckets());
  for (size_t b = 0; b < plan.num_buckets(); ++b) {
    buckets.emplace_back(table, plan, b, hook, options, used, memory,
                         statistics);
  }
  std::vector<Collective*> sequence;
  sequence.reserve(buckets.size() + 1);
  const bool map_is_first =
      used != nullptr && used->turn() == UsedParameters::Turn::kFirst;
  if (map_is_first) sequence.push_back(used);
  const size_t first_bucket = sequence.size();
  for (Bucket& bucket : buckets) sequence.push_back(&bucket);
  if (used != nullptr && !map_is_first) sequence.push_back(used);
  const uint64_t fingerprint = plan_fingerprint(plan, table, hook);
  return {.plan = std::move(plan),
          .buckets = std::move(buckets),
          .sequence = std::move(sequence),
          .first_bucket = first_bucket,
          .fingerprint = fingerprint};
}

}  // namespace brigade
