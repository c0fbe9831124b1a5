// Counts of a reducer's work so far, and its last error.

#ifndef BRIGADE_REDUCER_STATISTICS_H_
#define BRIGADE_REDUCER_STATISTICS_H_

#include <cstdint>
#include <string>

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

}  // namespace brigade

#endif  // BRIGADE_REDUCER_STATISTICS_H_
