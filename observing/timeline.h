// Statistics of a reducer, and timelines of one of its iterations or of one
// step of a sharded model (docs/guides/timelines.md).
//
//   std::cout << describe(reducer.timeline());
//   std::cout << describe(sharded->timeline());
//   std::ofstream("trace0.json") << to_chrome_trace(reducer.timeline(), 0);
//
// All times are nanoseconds of the steady clock; 0 if the event did not happen.
// On devices with streams, times of buckets and units are the stream's. All
// other times are the host's.
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

// The first iterations are sampled at any rate but 0. Source: torch's DDP
// logging.
constexpr int64_t kAlwaysSampled = 10;
constexpr int64_t kDefaultSampleRate = 100;

struct ReducerStatistics {
  int64_t prepared = 0;          // calls of prepare_for_backward
  int64_t begun = 0;             // iterations, on the furthest rank
  int64_t reduced = 0;           // complete iterations
  int64_t aborted = 0;           // iterations that ended with an error
  int64_t buckets_launched = 0;  // comm hook calls that returned
  int64_t rebuilds = 0;          // of the bucket plan
  int64_t buckets_skipped = 0;   // unused on all ranks, or empty
};

struct ReductionError {
  int64_t time_ns = 0;
  int64_t iteration = 0;  // last prepared
  std::string text = {};  // without a backtrace
};

struct GradientTime {
  VariableIndex variable;
  int64_t ready_ns = 0;  // on the host
};

struct UnitTimes {
  int64_t pack_begin_ns = 0;
  int64_t pack_end_ns = 0;
  int64_t launch_ns = 0;    // comm hook called; 0: nothing was sent
  int64_t complete_ns = 0;  // its future completed
  int64_t bytes = 0;        // of the buffer; 0: sparse
};

struct Timeline {
  int64_t iteration = 0;         // 0: none has been sampled
  int64_t forward_begin_ns = 0;  // Reducer::forward_begins()
  int64_t forward_end_ns = 0;    // Reducer::prepare_for_backward()
  int64_t backward_begin_ns = 0;
  int64_t host_backward_begin_ns = 0;  // the host is ahead of a device
  int64_t backward_end_ns = 0;         // finalize begins
  int64_t finalize_end_ns = 0;
  std::vector<GradientTime> gradients = {};  // in the order of readiness
  std::vector<UnitTimes> units = {};         // buckets, in launch order
};

// Source: torch's DDP logging data. Differs: backward begins when it reaches
// forward's outputs, which excludes the loss; communication is the time during
// which at least one unit is in flight.
struct TimelineSummary {
  int64_t forward_compute_ns = 0;
  int64_t backward_compute_ns = 0;
  int64_t backward_comm_ns = 0;
  int64_t overlap_ns = 0;  // communication during backward's computation
  int64_t exposed_ns = 0;  // communication that backward waits for
  std::vector<int64_t> unit_exposed_ns = {};  // share of each unit
  int64_t comm_begin_ns = 0;                  // first launch
  int64_t comm_end_ns = 0;                    // last completion
};

TimelineSummary summarize(const Timeline& timeline);

// Returns a line for a log: "iteration 8: compute 90.114 ms, communication
// 40.637 ms, 8.212 exposed, overlap 80 %". Computation is forward and backward.
std::string summary_line(const Timeline& timeline);

// Returns the summary line and a table with one line per bucket, in ms since
// the begin of backward.
std::string describe(const Timeline& timeline);

// Returns the timeline as JSON in the Trace Event Format, for Perfetto and
// Holistic Trace Analysis. `rank`: the rank's number among all processes.
std::string to_chrome_trace(const Timeline& timeline, int rank);

// ---- Sharded models: all-gathers and reduce-scatters of units.

enum class GatheredIn { kForward, kBackward, kOther };

struct GatherTimes {
  std::string unit = {};
  GatheredIn pass = GatheredIn::kOther;
  int64_t launch_ns = 0;
  int64_t complete_ns = 0;
  int64_t needed_ns = 0;     // first use; 0: this rank did not use it
  int64_t unsharded_ns = 0;  // the host continued
  int64_t bytes = 0;         // of the unsharded parameters

  // Returns the time between launch and completion during which the host
  // waited; on devices the host does not wait.
  int64_t exposed_ns() const;
};

struct ReductionTimes {
  std::string unit = {};
  int64_t launch_ns = 0;
  int64_t complete_ns = 0;
  int64_t bytes = 0;  // of the unsharded gradients
};

// Times of one step: from the first forward after a reduced backward to the end
// of the next reduced backward.
struct ShardingTimeline {
  int64_t iteration = 0;  // counts reduced backwards; 0: none was sampled
  int64_t forward_begin_ns = 0;
  int64_t forward_end_ns = 0;  // of the last forward
  int64_t backward_begin_ns = 0;
  int64_t backward_end_ns = 0;                  // all gradients are computed
  int64_t finalize_end_ns = 0;                  // all reductions are complete
  std::vector<GatherTimes> gathers = {};        // in launch order
  std::vector<ReductionTimes> reductions = {};  // in launch order

  // Returns the time of a reduction after backward that does not overlap an
  // earlier reduction. `reduction`: index in `reductions`.
  int64_t exposed_ns(size_t reduction) const;
};

// As for a Timeline. Computation excludes the host's waits for all-gathers; the
// table has one line per collective, in ms since the begin of forward.
std::string summary_line(const ShardingTimeline& timeline);
std::string describe(const ShardingTimeline& timeline);
std::string to_chrome_trace(const ShardingTimeline& timeline, int rank);

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_TIMELINE_H_
