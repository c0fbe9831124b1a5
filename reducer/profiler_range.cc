#include "brigade/reducer/profiler_range.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {

ProfilerRange::ProfilerRange(const std::string& name, at::RecordScope scope) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(scope);
  if (!callbacks) return;
  function_.emplace(*std::move(callbacks));
  function_->before(name, c10::ArrayRef<const c10::IValue>());
}

RangeNames::RangeNames(size_t num_buckets) {
  for (size_t b = 0; b < num_buckets; ++b) {
    const std::string bucket =
        absl::StrCat("brigade: bucket ", b, " of ", num_buckets);
    pack.push_back(absl::StrCat(bucket, " pack"));
    launch.push_back(absl::StrCat(bucket, " launch"));
  }
}

}  // namespace brigade
