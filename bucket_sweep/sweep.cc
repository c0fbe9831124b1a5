#include "brigade/bucket_sweep/sweep.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "brigade/bucket_sweep/measurement.h"

namespace brigade {
namespace {

// Significance level: the probability of recommending a size that is no better.
constexpr double kSignificance = 0.05;

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

ArmSummary summary_of(const PlanSamples& plan, const Rounds& local) {
  std::string label;
  for (const BucketArm& arm : plan.arms) {
    label += (label.empty() ? "" : ", ") + arm.label;
  }
  return {.label = std::move(label),
          .caps_bytes = plan.arms.front().caps_bytes,
          .bucket_bytes = plan.bucket_bytes,
          .step_ms = quartiles(flat(plan.rounds_ms)),
          .exposed_ms = quartiles(exposed(plan.rounds_ms, local)),
          .alone_ms = median(plan.alone_ms)};
}

// Returns the probability that a fair coin shows at least `heads` heads.
double binomial_tail(int64_t heads, int64_t throws) {
  double ways = 0;
  double choices = 1;  // throws over k
  for (int64_t k = 0; k <= throws; ++k) {
    if (k >= heads) ways += choices;
    choices =
        choices * static_cast<double>(throws - k) / static_cast<double>(k + 1);
  }
  return ways / std::exp2(static_cast<double>(throws));
}

Recommendation compare(const SweepSamples& samples, size_t arm) {
  const std::vector<double> before = medians(samples.plans[0].rounds_ms);
  const std::vector<double> after = medians(samples.plans[arm].rounds_ms);
  Recommendation found{.arm = arm};
  std::vector<double> saved;
  for (size_t i = 0; i < before.size(); ++i) {
    saved.push_back(before[i] - after[i]);
    found.rounds_faster += saved.back() > 0 ? 1 : 0;
  }
  found.rounds = static_cast<int64_t>(saved.size());
  found.saved_ms = quartiles(saved);
  found.saved_share = found.saved_ms.median / median(before);
  const auto num_candidates = static_cast<double>(samples.plans.size() - 1);
  found.decided =
      num_candidates * binomial_tail(found.rounds_faster, found.rounds) <=
      kSignificance;
  return found;
}

struct Sizes {
  double min = 0;
  double median = 0;
  double max = 0;
};

Sizes sizes_of(const ArmSummary& arm) {
  const std::vector<double> bytes(arm.bucket_bytes.begin(),
                                  arm.bucket_bytes.end());
  return {quantile(bytes, 0), quantile(bytes, 0.5), quantile(bytes, 1)};
}

std::string readable_bytes(double bytes) {
  const auto shown = [](double value, const char* unit) {
    return absl::StrFormat("%.*f %s",
                           value >= 100  ? 0
                           : value >= 10 ? 1
                                         : 2,
                           value, unit);
  };
  if (bytes < 1e3) return absl::StrFormat("%.0f B", bytes);
  if (bytes < 1e6) return shown(bytes / 1e3, "kB");
  return shown(bytes / 1e6, "MB");
}

std::string spread(const Quartiles& times) {
  return absl::StrFormat("[%.1f, %.1f]", times.p25, times.p75);
}

std::string readable_overlap(double overlap) {
  return overlap > 0 ? absl::StrFormat("%.0f %%", 100 * overlap) : "none";
}

std::string row(const ArmSummary& arm, int label_width) {
  const Sizes sizes = sizes_of(arm);
  return absl::StrFormat(
      "%-*s  %7d  %8s %8s %8s  %8.1f %17s  %10.1f  %8.1f  %7s\n", label_width,
      arm.label, arm.bucket_bytes.size(), readable_bytes(sizes.min),
      readable_bytes(sizes.median), readable_bytes(sizes.max),
      arm.step_ms.median, spread(arm.step_ms), arm.exposed_ms.median,
      arm.alone_ms, readable_overlap(arm.overlap()));
}

std::string setting_of(const ArmSummary& arm) {
  const int64_t bytes = arm.caps_bytes.front();
  if (bytes == std::numeric_limits<int64_t>::max()) {
    return "bucket_cap_bytes = {std::numeric_limits<int64_t>::max()} or "
           "bucket_cap_mb=1e6";
  }
  return absl::StrFormat("bucket_cap_bytes = {%s} or bucket_cap_mb=%g",
                         absl::StrJoin(arm.caps_bytes, ", "),
                         bytes == 1 ? 0 : static_cast<double>(bytes) / 0x1p20);
}

std::string recommendation(const SweepSummary& summary) {
  if (!summary.best) {
    return "recommended: the default; all sizes result in the same buckets";
  }
  const Recommendation& best = *summary.best;
  if (best.saved_ms.median <= 0) {
    return "recommended: the default; no other size is faster";
  }
  const ArmSummary& arm = summary.arms[best.arm];
  const std::string margin = absl::StrFormat(
      "%.1f ms (%.1f %%) less per step than the default %s, faster in %d of %d "
      "rounds",
      best.saved_ms.median, 100 * best.saved_share, spread(best.saved_ms),
      best.rounds_faster, best.rounds);
  if (!best.decided) {
    return absl::StrCat("recommended: the default; ", arm.label, ": ", margin,
                        ", which may be chance");
  }
  return absl::StrCat("recommended: ", setting_of(arm), " (", arm.label, "); ",
                      margin);
}

using Json = nlohmann::ordered_json;

Json json(const Quartiles& times) {
  return {{"p25", times.p25}, {"median", times.median}, {"p75", times.p75}};
}

Json json(const ArmSummary& arm) {
  const Sizes sizes = sizes_of(arm);
  return {{"cap", arm.label},
          {"caps_bytes", arm.caps_bytes},
          {"buckets", arm.bucket_bytes.size()},
          {"bucket_bytes",
           {{"min", sizes.min}, {"median", sizes.median}, {"max", sizes.max}}},
          {"step_ms", json(arm.step_ms)},
          {"exposed_ms", json(arm.exposed_ms)},
          {"alone_ms", arm.alone_ms},
          {"overlap", arm.overlap()}};
}

Json json_of_best(const SweepSummary& summary) {
  if (!summary.best) return nullptr;
  const Recommendation& best = *summary.best;
  return {{"cap", summary.arms[best.arm].label},
          {"caps_bytes", summary.arms[best.arm].caps_bytes},
          {"saved_ms", json(best.saved_ms)},
          {"saved_share", best.saved_share},
          {"rounds_faster", best.rounds_faster},
          {"rounds", best.rounds},
          {"decided", best.decided}};
}

}  // namespace

double quantile(std::vector<double> samples, double q) {
  std::ranges::sort(samples);
  const double position = q * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, samples.size() - 1);
  return std::lerp(samples[below], samples[above],
                   position - static_cast<double>(below));
}

Quartiles quartiles(const std::vector<double>& samples) {
  return {.p25 = quantile(samples, 0.25),
          .median = quantile(samples, 0.5),
          .p75 = quantile(samples, 0.75)};
}

SweepSummary sweep(const std::vector<at::Tensor>& parameters,
                   const std::function<at::Tensor()>& loss,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const SweepOptions& options) {
  return summarize(measure(parameters, loss, options.sizes, group,
                           options.rounds, options.steps, options.reducer));
}

SweepSummary summarize(const SweepSamples& samples) {
  SweepSummary summary{.num_parameters = samples.num_parameters,
                       .gradient_bytes = samples.gradient_bytes,
                       .local_ms = quartiles(flat(samples.local_ms))};
  for (const PlanSamples& plan : samples.plans) {
    summary.arms.push_back(summary_of(plan, samples.local_ms));
  }
  for (size_t arm = 1; arm < samples.plans.size(); ++arm) {
    const Recommendation found = compare(samples, arm);
    if (!summary.best ||
        found.saved_ms.median > summary.best->saved_ms.median) {
      summary.best = found;
    }
  }
  return summary;
}

std::string to_text(const std::string& name, const SweepSummary& summary) {
  size_t label_width = 10;
  for (const ArmSummary& arm : summary.arms) {
    label_width = std::max(label_width, arm.label.size());
  }
  const auto width = static_cast<int>(label_width);
  std::string text = absl::StrFormat(
      "%s: %d gradients, %s; step without a reducer %.1f ms %s\n", name,
      summary.num_parameters,
      readable_bytes(static_cast<double>(summary.gradient_bytes)),
      summary.local_ms.median, spread(summary.local_ms));
  absl::StrAppendFormat(&text, "%-*s  %7s  %26s  %8s %17s  %10s  %8s  %7s\n",
                        width, "cap", "buckets", "min   median      max",
                        "step ms", "[p25, p75]", "exposed ms", "alone ms",
                        "overlap");
  for (const ArmSummary& arm : summary.arms) text += row(arm, width);
  return text +
         "exposed: time added to a step; alone: the all-reduces without a "
         "step; "
         "overlap: the share of alone that backward hides\n" +
         recommendation(summary) + "\n";
}

std::string to_json(const std::string& name, const SweepSummary& summary) {
  Json arms = Json::array();
  for (const ArmSummary& arm : summary.arms) arms.push_back(json(arm));
  return Json{{"name", name},
              {"parameters", summary.num_parameters},
              {"gradient_bytes", summary.gradient_bytes},
              {"local_ms", json(summary.local_ms)},
              {"arms", std::move(arms)},
              {"best", json_of_best(summary)},
              {"recommendation", recommendation(summary)}}
      .dump(2);
}

}  // namespace brigade
