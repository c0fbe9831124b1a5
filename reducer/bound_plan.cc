#include "brigade/reducer/bound_plan.h"

#include <c10/util/hash.h>

#include <functional>
#include <string>
#include <utility>

namespace brigade {

uint64_t plan_fingerprint(const BucketPlan& plan, const ParameterTable& table,
                          const HookTraits& hook) {
  uint64_t fingerprint = plan.num_buckets();
  const auto add = [&](uint64_t number) {
    fingerprint = c10::hash_combine(fingerprint, number);
  };
  at::DimVector room;
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    add(bucket.size());
    for (const size_t parameter : bucket) {
      add(parameter);
      add(table.numel(parameter));
      const at::IntArrayRef shape = table.shape(parameter);
      const at::IntArrayRef strides = table.gradient_strides(parameter, room);
      for (size_t d = 0; d < strides.size(); ++d) {
        if (shape[d] > 1) add(strides[d]);
      }
      add(static_cast<uint64_t>(hook.wire_dtype(table.dtype(parameter))));
    }
  }
  if (!hook.name.empty()) add(std::hash<std::string>()(hook.name));
  return fingerprint;
}

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
