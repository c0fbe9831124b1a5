#include "brigade/reducer/plan_fingerprint.h"

#include <c10/util/hash.h>

#include <functional>
#include <string>

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

}  // namespace brigade
