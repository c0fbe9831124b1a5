// Times one workload with several bucket caps.
//
// All arms, and the same loop without a reducer, take turns in one run, in
// alternating order, so that a slow minute of the machine hits all of them.
// Differences are taken within a round.

#ifndef BRIGADE_BENCHMARKS_BUCKET_SIZE_SWEEP_H_
#define BRIGADE_BENCHMARKS_BUCKET_SIZE_SWEEP_H_

#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/benchmarks/bucket_size/workload.h"
#include "brigade/benchmarks/support/quantiles.h"

namespace brigade::benchmarks {

struct Arm {
  std::string label;
  int64_t cap_bytes = 0;
};

struct SweepOptions {
  int64_t rounds = 5;
  int64_t steps = 3;  // timed per arm and round, after one that is not
};

struct ArmResult {
  std::string label;  // of all arms that give this plan
  int64_t num_buckets = 0;
  Quartiles bucket_bytes;
  int64_t min_bucket_bytes = 0;
  int64_t max_bucket_bytes = 0;
  Quartiles step_ms;

  // What the step takes longer than one without a reducer.
  Quartiles exposed_ms;

  // All-reduces of buffers as large as the buckets, one after the other, while
  // nothing else is done.
  double alone_ms = 0;

  // The share of the latter that backward hides.  Negative when packing,
  // latency and waiting for the slower rank cost more than backward hides.
  double overlap() const { return 1 - exposed_ms.median / alone_ms; }

  bool sums_verified = false;  // all ranks had the right averages
};

struct SweepResult {
  Quartiles local_ms;  // a step without a reducer
  std::vector<ArmResult> arms;
};

// Collective.  Times are those of the slowest rank.  Arms that give the same
// plan are measured once.  `after_visit` is called once per arm and round; the
// number of calls is at most (arms + 1) * rounds.
SweepResult sweep(Workload& workload,
                  const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  const std::vector<Arm>& arms, const SweepOptions& options,
                  const std::function<void(const std::string&)>& after_visit);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_BUCKET_SIZE_SWEEP_H_
