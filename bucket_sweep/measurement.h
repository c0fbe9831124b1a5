// Step times of a model under several bucket sizes.
//
// All sizes, and the same steps without communication, take turns in one run,
// in alternating order. A slow phase of the machine then affects all of them.

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

struct BucketArm {
  std::string label;
  std::vector<int64_t> caps_bytes;  // ReducerOptions::bucket_cap_bytes
};

BucketArm default_arm();

// Parses "0.25", a bucket cap in MiB; "one", one bucket for all parameters; or
// "each", one bucket per parameter. Throws ValueError for any other text.
BucketArm arm_of(std::string_view size);

// Times of one bucket plan on the slowest rank.
struct PlanSamples {
  std::vector<BucketArm> arms = {};               // all that result in the plan
  std::vector<std::vector<size_t>> buckets = {};  // empty: no communication
  std::vector<int64_t> bucket_bytes = {};
  std::vector<std::vector<double>> rounds_ms = {};  // by round, then by step
  std::vector<double> alone_ms = {};  // the buckets' all-reduces, by round
};

struct SweepSamples {
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  std::vector<std::vector<double>> local_ms = {};  // no communication, by round
  std::vector<PlanSamples> plans = {};             // the default's first
};

// Collects the samples of sweep(); same contract.
SweepSamples measure(const std::vector<at::Tensor>& parameters,
                     const std::function<at::Tensor()>& loss,
                     const std::vector<std::string>& sizes,
                     const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                     int64_t num_rounds, int64_t num_steps,
                     const ReducerOptions& options);

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_MEASUREMENT_H_
