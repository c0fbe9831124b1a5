// Counts of a reducer's work; times of the steps of one iteration of it, with a
// summary of its communication, and of one step of a sharded model
// (docs/timeline.md).
//
//   std::cout << describe(reducer.timeline());
//   std::cout << describe(sharded->timeline());
//
// All times are nanoseconds of the steady clock, 0 for a step that did not
// happen. Steps of buckets on devices with streams are stamped when the
// device's stream passed them, all others when the host did.
//
// Thread safety: pure functions.

#ifndef BRIGADE_OBSERVING_TIMELINE_H_
#define BRIGADE_OBSERVING_TIMELINE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

struct ReducerStatistics {
  int64_t prepared = 0;          // calls of prepare_for_backward
  int64_t begun = 0;             // iterations; as far as the furthest rank
  int64_t reduced = 0;           // iterations reduced to the end
  int64_t aborted = 0;           // iterations that an error ended
  int64_t buckets_launched = 0;  // comm hook calls that returned
  int64_t rebuilds = 0;          // of the plan, from the observed order
  int64_t buckets_skipped = 0;   // unused on all ranks, or without elements
};

struct ReductionError {
  int64_t time_ns = 0;    // steady clock
  int64_t iteration = 0;  // the last that was prepared
  std::string text = {};  // without a backtrace
};

struct GradientTime {
  VariableIndex variable;
  int64_t ready_ns = 0;  // on the host
};

struct UnitTimes {
  int64_t pack_begin_ns = 0;
  int64_t pack_end_ns = 0;
  int64_t launch_ns = 0;    // the comm hook was called; 0: nothing was sent
  int64_t complete_ns = 0;  // its future was complete
};

struct Timeline {
  int64_t iteration = 0;         // 0: none has been sampled
  int64_t forward_begin_ns = 0;  // Engine::forward_begins()
  int64_t forward_end_ns = 0;    // prepare()
  int64_t backward_begin_ns = 0;
  int64_t host_backward_begin_ns = 0;  // the host is ahead of a device
  int64_t backward_end_ns = 0;         // finalize begins
  int64_t finalize_end_ns = 0;
  std::vector<GradientTime> gradients = {};  // in the order they became ready
  std::vector<UnitTimes> units = {};         // in launch order
};

// Source: torch's DDP logging data. Differs: backward begins where it reaches
// forward's outputs, so that the loss belongs to neither side; communication
// is the time in which at least one unit's is in flight.
struct TimelineSummary {
  int64_t forward_compute_ns = 0;
  int64_t backward_compute_ns = 0;
  int64_t backward_comm_ns = 0;
  int64_t overlap_ns = 0;  // of communication with backward's computation
  int64_t exposed_ns = 0;  // communication that backward waits for
  std::vector<int64_t> unit_exposed_ns = {};  // each unit's share of that
  int64_t comm_begin_ns = 0;                  // first launch
  int64_t comm_end_ns = 0;                    // last completion
};

TimelineSummary summarize(const Timeline& timeline);

// A table for people: one line per bucket, in ms from the begin of backward.
std::string describe(const Timeline& timeline);

// ---- Of a sharded model: when units were gathered and reduced, and how much
// of that the computation covered.

// Why a unit is gathered; kOther: neither for forward nor for backward.
enum class GatheredIn { kForward, kBackward, kOther };

struct GatherTimes {
  std::string unit = {};
  GatheredIn pass = GatheredIn::kOther;
  int64_t launch_ns = 0;
  int64_t complete_ns = 0;
  int64_t needed_ns = 0;  // first; 0: this rank did not need it
  int64_t whole_ns = 0;   // the host went on

  // The part between launch and completion that the host waited for; on devices
  // it does not wait.
  int64_t exposed_ns() const;
};

struct ReductionTimes {
  std::string unit = {};
  int64_t launch_ns = 0;
  int64_t complete_ns = 0;
};

// A step: from the first forward after a reduced backward to the end of the
// next one.
struct ShardingTimeline {
  int64_t iteration = 0;  // of reduced backwards; 0: none has been sampled
  int64_t forward_begin_ns = 0;
  int64_t forward_end_ns = 0;  // of the last one
  int64_t backward_begin_ns = 0;
  int64_t backward_end_ns = 0;                  // all gradients are there
  int64_t finalize_end_ns = 0;                  // and all sums
  std::vector<GatherTimes> gathers = {};        // in launch order
  std::vector<ReductionTimes> reductions = {};  // in launch order

  // The part of the reduction after backward that no earlier one covers.
  int64_t exposed_ns(size_t reduction) const;
};

// A table for people: one line per gather and reduction, in ms from the begin
// of forward.
std::string describe(const ShardingTimeline& timeline);

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_TIMELINE_H_
