// Times one workload with several bucket sizes; knows no statistics.
//
// All arms, and the same steps without a reducer, take turns in one run, in
// alternating order, so that a slow minute of the machine hits all of them.

#ifndef BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_
#define BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/bucket_sweep/workload.h"
#include "brigade/reducer/reducer_options.h"

namespace brigade {

// A bucket size that a sweep tries.
struct BucketArm {
  std::string label;
  std::vector<int64_t> caps_bytes;  // ReducerOptions::bucket_caps_bytes
};

// What a reducer does if nobody says anything.
BucketArm default_arm();

// "0.25": buckets of so many MiB; "one" bucket for all parameters; one for
// "each". Errors: ValueError if it is none of these.
BucketArm arm_of(std::string_view cap);
std::vector<BucketArm> arms_of(const std::vector<std::string>& caps);

// One per parameter, 0.25 to 100 MiB, and one for all.
std::vector<BucketArm> usual_arms();

struct SweepOptions {
  int64_t rounds = 8;  // visits to each arm
  int64_t steps = 3;   // timed per visit, after one that is not

  // How the model is trained, but for sizes of buckets and the plan. With a
  // comm hook that does anything but average, sums are not right.
  ReducerOptions reducer = {};
};

// Arms that give the same buckets, and what was seen of them. Times are those
// of the slowest rank.
struct SweepTrack {
  std::vector<BucketArm> arms = {};  // none: without a reducer
  std::vector<std::vector<size_t>> buckets = {};
  std::vector<int64_t> bucket_bytes = {};
  std::vector<std::vector<double>> rounds_ms = {};  // by round, then by step
  std::vector<double> alone_ms = {};  // the buckets' all-reduces, by round
  bool sums_verified = false;         // on all ranks
};

struct SweepSamples {
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  std::vector<std::vector<double>> local_ms =
      {};                               // without a reducer, by round
  std::vector<SweepTrack> tracks = {};  // the first has the default's buckets
};

// Collective. Times steps with the default's buckets and those of each arm.
// Parameters keep their values and end without gradients. `after_visit` may be
// null; it is called at most (arms + 2) * (rounds + 1) times.
//
// Errors: ValueError if rounds or steps are < 1 or there is no parameter; what
// a Reducer throws. Thread safety: one call at a time.
SweepSamples measure(
    SweepWorkload& workload, const std::vector<BucketArm>& arms,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const SweepOptions& options = {},
    const std::function<void(const std::string& arm)>& after_visit = nullptr);

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_
