// Observations of an engine's work: counts, the timeline, ranges for profilers,
// the last error, and how far it has come.
//
// Thread safety: the engine's lock covers it, but for the last error, progress
// and the stall watch, which any thread may use.

#ifndef BRIGADE_REDUCER_OBSERVATIONS_H_
#define BRIGADE_REDUCER_OBSERVATIONS_H_

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/observing/stall_watch.h"
#include "brigade/observing/timeline_recorder.h"

namespace brigade {

// Open in a profiler while it lives, if one is active when it is made. Costs a
// look at the thread's callbacks otherwise.
class ProfilerRange {
 public:
  // `scope`: of a step that a user sees in a trace, or of a function. `name`
  // outlives this object.
  explicit ProfilerRange(const std::string& name,
                         at::RecordScope scope = at::RecordScope::USER_SCOPE);
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  std::optional<at::RecordFunction> function_;
};

struct Observations {
  // The buckets are these from here on; `devices` of each, in launch order.
  void bind(std::vector<c10::Device> devices, size_t num_variables);

  // Stalls are reported from here on, in these terms.
  void watch_stalls(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    const std::string& store_prefix,
                    StallWatch::Names stall_names,
                    std::function<std::string()> describe_progress);

  void iteration_begins(int64_t iteration);
  // `future`: null if nothing can be awaited.
  void launched(size_t unit, c10::ivalue::Future* future);

  // To be called in a catch block, without the engine's lock. Does not throw.
  void note_error();
  std::optional<ReductionError> last_error() const;

  ReducerStatistics counts;

  TimelineRecorder timeline;
  std::vector<std::string> pack_names = {};    // by bucket, of profiler ranges
  std::vector<std::string> launch_names = {};  // likewise
  const std::string finalize_name = "brigade: finalize";
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  // Null: ranks are not connected, nobody to wait for, or no store.
  std::unique_ptr<StallWatch> stall_watch = {};
  // Settings for it, given before it exists.
  std::optional<std::chrono::milliseconds> stall_report_after = {};
  std::function<void(const std::string& report)> stall_handler = {};

 private:
  mutable std::mutex error_mutex_;
  std::optional<ReductionError> last_error_;  // guarded by error_mutex_
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_OBSERVATIONS_H_
