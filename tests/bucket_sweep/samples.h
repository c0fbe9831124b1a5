// Samples of a sweep, as if somebody had measured them.

#ifndef BRIGADE_TESTS_BUCKET_SWEEP_SAMPLES_H_
#define BRIGADE_TESTS_BUCKET_SWEEP_SAMPLES_H_

#include <vector>

#include "brigade/bucket_sweep/measurement.h"

namespace brigade::testing {

inline std::vector<std::vector<double>> one_step_each(
    const std::vector<double>& times) {
  std::vector<std::vector<double>> rounds;
  for (const double time : times) rounds.push_back({time});
  return rounds;
}

// One step per round of the default and of one other arm; 10 ms without a
// reducer.
inline SweepSamples samples_of(const std::vector<double>& default_ms,
                               const std::vector<double>& other_ms) {
  return {.num_parameters = 3,
          .gradient_bytes = 3'000'000,
          .local_ms = one_step_each(std::vector<double>(default_ms.size(), 10)),
          .tracks = {{.arms = {default_arm()},
                      .buckets = {{2}, {1, 0}},
                      .bucket_bytes = {1'000'000, 2'000'000},
                      .rounds_ms = one_step_each(default_ms),
                      .alone_ms = {4}},
                     {.arms = {arm_of("4"), arm_of("one")},
                      .buckets = {{2, 1, 0}},
                      .bucket_bytes = {3'000'000},
                      .rounds_ms = one_step_each(other_ms),
                      .alone_ms = {8},
                      .sums_verified = true}}};
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_BUCKET_SWEEP_SAMPLES_H_
