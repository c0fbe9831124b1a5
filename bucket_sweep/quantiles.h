// Median and quartiles: what a shared machine's times are told by.

#ifndef BRIGADE_BUCKET_SWEEP_QUANTILES_H_
#define BRIGADE_BUCKET_SWEEP_QUANTILES_H_

#include <algorithm>
#include <cmath>
#include <vector>

#include "brigade/bucket_sweep/sweep.h"

namespace brigade {

// Between two samples, linearly.  REQUIRES: samples not empty; 0 <= q <= 1.
inline double quantile(std::vector<double> samples, double q) {
  std::sort(samples.begin(), samples.end());
  const double place = q * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, samples.size() - 1);
  return std::lerp(samples[below], samples[above],
                   place - static_cast<double>(below));
}

inline Quartiles quartiles(const std::vector<double>& samples) {
  return {.p25 = quantile(samples, 0.25),
          .median = quantile(samples, 0.5),
          .p75 = quantile(samples, 0.75)};
}

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_QUANTILES_H_
