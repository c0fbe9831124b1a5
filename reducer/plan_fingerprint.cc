#include "brigade/reducer/plan_fingerprint.h"

#include <c10/util/hash.h>

#include <functional>
#include <string>

#include "brigade/comm_hooks/gradient_layout.h"
#include "brigade/comm_hooks/hook_name.h"
#include "brigade/comm_hooks/wire_format.h"

namespace brigade {

uint64_t plan_fingerprint(const BucketPlan& plan, const ParameterTable& table,
                          const c10d::CommHookInterface& hook) {
  const auto* declared = dynamic_cast<const DeclaresWireFormat*>(&hook);
  uint64_t fingerprint = plan.num_buckets();
  const auto add = [&](uint64_t number) {
    fingerprint = c10::hash_combine(fingerprint, number);
  };
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    add(bucket.size());
    for (const size_t parameter : bucket) {
      const at::ScalarType dtype = table.dtype(parameter);
      add(parameter);
      add(table[parameter].numel());
      at::DimVector room;
      const at::IntArrayRef strides = gradient_strides(table[parameter], room);
      for (size_t d = 0; d < strides.size(); ++d) {
        if (table[parameter].size(d) > 1) add(strides[d]);
      }
      add(static_cast<uint64_t>(declared ? declared->wire_format(dtype).dtype
                                         : dtype));
    }
  }
  if (const std::string name = name_of(hook); !name.empty()) {
    add(std::hash<std::string>()(name));
  }
  return fingerprint;
}

}  // namespace brigade
