#include "brigade/reducer/plan_fingerprint.h"

#include <c10/util/hash.h>

#include <functional>
#include <string>

#include "brigade/comm_hooks/gradient_layout.h"

namespace brigade {

uint64_t plan_fingerprint(const BucketPlan& plan, const ParameterTable& table,
                          const HookTraits& hook) {
  uint64_t fingerprint = plan.num_buckets();
  const auto add = [&](uint64_t number) {
    fingerprint = c10::hash_combine(fingerprint, number);
  };
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    add(bucket.size());
    for (const size_t parameter : bucket) {
      add(parameter);
      add(table[parameter].numel());
      at::DimVector room;
      const at::IntArrayRef strides = gradient_strides(table[parameter], room);
      for (size_t d = 0; d < strides.size(); ++d) {
        if (table[parameter].size(d) > 1) add(strides[d]);
      }
      add(static_cast<uint64_t>(hook.wire_dtype(table.dtype(parameter))));
    }
  }
  if (!hook.name.empty()) add(std::hash<std::string>()(hook.name));
  return fingerprint;
}

}  // namespace brigade
