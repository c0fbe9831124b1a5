#include "brigade/engine/observing/profiler_range.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace brigade {

ProfilerRange::ProfilerRange(const std::string& name, at::RecordScope scope) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(scope);
  if (!callbacks) return;
  function_.emplace(*std::move(callbacks));
  function_->before(name, c10::ArrayRef<const c10::IValue>());
}

RangeNames::RangeNames(size_t num_units, std::string_view unit_word) {
  for (size_t u = 0; u < num_units; ++u) {
    const std::string unit = absl::StrCat("brigade: ", std::string(unit_word),
                                          " ", u, " of ", num_units);
    pack.push_back(absl::StrCat(unit, " pack"));
    launch.push_back(absl::StrCat(unit, " launch"));
  }
}

}  // namespace brigade
