// What a profiler shows of an engine: ranges named by unit.
//
// Costs a look at the thread's callbacks while no profiler is active.
//
// Thread safety: a range belongs to the thread that opened it; names are
// immutable.

#ifndef BRIGADE_REDUCER_PROFILER_RANGE_H_
#define BRIGADE_REDUCER_PROFILER_RANGE_H_

#include <ATen/record_function.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace brigade {

// Open while it lives, if a profiler is active when it is made.
class ProfilerRange {
 public:
  // `scope`: of a step that a user sees in a trace, or of a function.
  explicit ProfilerRange(const std::string& name,
                         at::RecordScope scope = at::RecordScope::USER_SCOPE);
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  std::optional<at::RecordFunction> function_;
};

// "brigade: bucket 2 of 5 pack"; made once per plan.
struct RangeNames {
  RangeNames() = default;
  explicit RangeNames(size_t num_buckets);

  std::vector<std::string> pack;    // by bucket
  std::vector<std::string> launch;  // by bucket
  std::string finalize = "brigade: finalize";
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_PROFILER_RANGE_H_
