#include "brigade/bucket_sweep/summary.h"

#include <cmath>

namespace brigade {
namespace {

// Of recommending a size that is no better, with all sizes tried.
constexpr double kChance = 0.05;

using Rounds = std::vector<std::vector<double>>;

std::vector<double> flat(const Rounds& rounds) {
  std::vector<double> values;
  for (const std::vector<double>& times : rounds) {
    values.insert(values.end(), times.begin(), times.end());
  }
  return values;
}

double median(const std::vector<double>& values) {
  return quantile(values, 0.5);
}

std::vector<double> medians(const Rounds& rounds) {
  std::vector<double> values;
  for (const std::vector<double>& times : rounds) {
    values.push_back(median(times));
  }
  return values;
}

std::vector<double> exposed(const Rounds& rounds, const Rounds& local) {
  std::vector<double> differences;
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (const double time : rounds[i]) {
      differences.push_back(time - median(local[i]));
    }
  }
  return differences;
}

ArmSummary summary_of(const SweepTrack& track, const Rounds& local) {
  std::string label;
  for (const BucketArm& arm : track.arms) {
    label += (label.empty() ? "" : ", ") + arm.label;
  }
  return {.label = std::move(label),
          .caps_bytes = track.arms.front().caps_bytes,
          .bucket_bytes = track.bucket_bytes,
          .step_ms = quartiles(flat(track.rounds_ms)),
          .exposed_ms = quartiles(exposed(track.rounds_ms, local)),
          .alone_ms = median(track.alone_ms),
          .sums_verified = track.sums_verified};
}

Recommendation compare(const SweepSamples& samples, size_t arm) {
  const std::vector<double> before = medians(samples.tracks[0].rounds_ms);
  const std::vector<double> after = medians(samples.tracks[arm].rounds_ms);
  Recommendation found{.arm = arm};
  std::vector<double> saved;
  for (size_t i = 0; i < before.size(); ++i) {
    saved.push_back(before[i] - after[i]);
    found.rounds_faster += saved.back() > 0 ? 1 : 0;
  }
  found.rounds = static_cast<int64_t>(saved.size());
  found.saved_ms = quartiles(saved);
  found.saved_share = found.saved_ms.median / median(before);
  const auto num_candidates = static_cast<double>(samples.tracks.size() - 1);
  found.decided =
      num_candidates * chance_of(found.rounds_faster, found.rounds) <= kChance;
  return found;
}

}  // namespace

double chance_of(int64_t heads, int64_t throws) {
  double ways = 0;
  double choices = 1;  // throws over k
  for (int64_t k = 0; k <= throws; ++k) {
    if (k >= heads) ways += choices;
    choices =
        choices * static_cast<double>(throws - k) / static_cast<double>(k + 1);
  }
  return ways / std::exp2(static_cast<double>(throws));
}

SweepSummary summarize(const SweepSamples& samples) {
  SweepSummary summary{.num_parameters = samples.num_parameters,
                       .gradient_bytes = samples.gradient_bytes,
                       .local_ms = quartiles(flat(samples.local_ms))};
  for (const SweepTrack& track : samples.tracks) {
    summary.arms.push_back(summary_of(track, samples.local_ms));
  }
  for (size_t arm = 1; arm < samples.tracks.size(); ++arm) {
    const Recommendation found = compare(samples, arm);
    if (!summary.best ||
        found.saved_ms.median > summary.best->saved_ms.median) {
      summary.best = found;
    }
  }
  return summary;
}

}  // namespace brigade
