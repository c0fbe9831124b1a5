// Times the training steps of a model with several bucket sizes.
//
// All sizes, and the same steps without a reducer, take turns in one run, in
// alternating order, so that a slow minute of the machine hits all of them.

#ifndef BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_
#define BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/reducer/reducer_options.h"

namespace brigade {

// A bucket size that a sweep tries.
struct BucketArm {
  std::string label;
  std::vector<int64_t> caps_bytes;  // ReducerOptions::bucket_cap_bytes
};

// The reducer's default.
BucketArm default_arm();

// "0.25": buckets of so many MiB; "one" bucket for all parameters; one for
// "each". Errors: ValueError if it is none of these.
BucketArm arm_of(std::string_view size);

// Arms that give the same buckets, and their times on the slowest rank.
struct SweepTrack {
  std::vector<BucketArm> arms = {};
  std::vector<std::vector<size_t>> buckets = {};  // none: without a reducer
  std::vector<int64_t> bucket_bytes = {};
  std::vector<std::vector<double>> rounds_ms = {};  // by round, then by step
  std::vector<double> alone_ms = {};  // the buckets' all-reduces, by round
};

struct SweepSamples {
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  std::vector<std::vector<double>> local_ms =
      {};                               // without a reducer, by round
  std::vector<SweepTrack> tracks = {};  // the first has the default's buckets
};

// sweep() of bucket_sweep/sweep.h, without statistics.
SweepSamples measure(const std::vector<at::Tensor>& parameters,
                     const std::function<at::Tensor()>& loss,
                     const std::vector<std::string>& sizes,
                     const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                     int64_t num_rounds, int64_t num_steps,
                     const ReducerOptions& options);

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_
