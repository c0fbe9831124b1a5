// Observations of an engine's work: counts, the timeline, ranges
// for profilers, the last error, and how far it has come.
//
// Decides nothing. Each event of an iteration is one call here, which passes it
// on to whoever wants it; the ends of a step are those of a scope:
//
//   const ObservedPack packing(observations_, unit);
//   ... packs it ...
//
// Thread safety: the engine's lock covers it, but for what says otherwise in
// its own header.

#ifndef BRIGADE_REDUCER_OBSERVATIONS_H_
#define BRIGADE_REDUCER_OBSERVATIONS_H_

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/observing/stall_watch.h"
#include "brigade/observing/timeline_recorder.h"
#include "brigade/reducer/iteration.h"
#include "brigade/reducer/last_error.h"
#include "brigade/reducer/profiler_range.h"

namespace brigade {

struct Observations {
  // The buckets are these from here on; `devices` of each, in launch order.
  void bind(std::vector<c10::Device> devices, size_t num_variables);

  // Stalls are reported from here on, in these terms.
  void watch_stalls(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                    const std::string& store_prefix,
                    StallWatch::Names stall_names,
                    std::function<std::string()> describe_progress);

  void iteration_begins(int64_t iteration);
  void launched(const Launch& launch);

  // To be called in a catch block, without the engine's lock.
  void note_error() { last_error.note(progress->iteration); }

  // As in ReducerStatistics.
  int64_t prepared = 0;
  int64_t begun = 0;
  int64_t reduced = 0;
  int64_t aborted = 0;
  int64_t buckets_launched = 0;
  int64_t buckets_skipped = 0;

  TimelineRecorder timeline;
  RangeNames names;
  LastError last_error;
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
  // Null: ranks are not connected, nobody to wait for, or no store.
  std::unique_ptr<StallWatch> stall_watch = {};
  // What it is told once it is there.
  std::optional<std::chrono::milliseconds> stall_report_after = {};
  std::function<void(const std::string& report)> stall_handler = {};
};

class ObservedPack {
 public:
  ObservedPack(Observations& observations, size_t unit)
      : timeline_(observations.timeline),
        unit_(unit),
        range_(observations.names.pack[unit]) {
    timeline_.pack_begins(unit_);
  }
  ~ObservedPack() { timeline_.pack_ends(unit_); }
  ObservedPack(const ObservedPack&) = delete;
  ObservedPack& operator=(const ObservedPack&) = delete;

 private:
  TimelineRecorder& timeline_;
  const size_t unit_;
  const ProfilerRange range_;
};

class ObservedLaunch {
 public:
  ObservedLaunch(Observations& observations, size_t unit)
      : range_(observations.names.launch[unit]) {
    observations.timeline.launch_begins(unit);
  }

 private:
  const ProfilerRange range_;
};

class ObservedFinalize {
 public:
  explicit ObservedFinalize(Observations& observations)
      : waiting_(*observations.progress), range_(observations.names.finalize) {
    observations.timeline.backward_ends();
  }

 private:
  const WaitForPeers waiting_;
  const ProfilerRange range_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_OBSERVATIONS_H_
