#include "brigade/bucket_sweep/sweep.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "brigade/bucket_sweep/measurement.h"

namespace brigade {
namespace {

// Significance level: the probability of recommending a size that is no better.
constexpr double kSignificance = 0.05;

// Shorter communication has no measurable overlap.
constexpr double kShortestMs = 0.1;

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
  found.saved_ms = quartiles(saved);
  found.saved_share = found.saved_ms.median / median(before);
  const auto num_candidates = static_cast<double>(samples.plans.size() - 1);
  found.decided =
      num_candidates * binomial_tail(found.rounds_faster,
                                     static_cast<int64_t>(saved.size())) <=
      kSignificance;
  return found;
}

// Shows three digits or more.
std::string readable(double value) {
  const double size = std::fabs(value);
  return absl::StrFormat("%.*f", size >= 100 ? 0 : size >= 10 ? 1 : 2, value);
}

std::string readable_bytes(double bytes) {
  if (bytes < 0x1p17) return readable(bytes / 0x1p10) + " KiB";
  return readable(bytes / 0x1p20) + " MiB";
}

std::string spread(const Quartiles& times) {
  return absl::StrCat("[", readable(times.p25), ", ", readable(times.p75), "]");
}

// Returns the first of the arm's sizes, and the others.
std::pair<std::string, std::string> sizes_of(const ArmSummary& arm) {
  return absl::StrSplit(arm.label, absl::MaxSplits(", ", 1));
}

std::string row(const std::string& size, const ArmSummary& arm) {
  const std::optional<double> overlap = arm.overlap();
  return absl::StrFormat(
      "%-18s %7d %8s  %5s %12s  %7s  %5s %7s\n", size, arm.bucket_bytes.size(),
      readable_bytes(static_cast<double>(std::ranges::max(arm.bucket_bytes))),
      readable(arm.step_ms.median), spread(arm.step_ms),
      readable(std::max(0.0, arm.exposed_ms.median)), readable(arm.alone_ms),
      overlap ? absl::StrFormat("%.0f %%", 100 * *overlap) : "-");
}

std::string setting_of(const ArmSummary& arm) {
  const int64_t bytes = arm.caps_bytes.front();
  if (bytes == std::numeric_limits<int64_t>::max()) {
    return "bucket_cap_mb=1e6 (C++: bucket_cap_bytes = {INT64_MAX})";
  }
  return absl::StrFormat("bucket_cap_mb=%g (C++: bucket_cap_bytes = {%d})",
                         bytes == 1 ? 0 : static_cast<double>(bytes) / 0x1p20,
                         bytes);
}

std::string recommendation(const SweepSummary& summary) {
  if (!summary.best) {
    return "recommended: keep the default (all caps give the same buckets)";
  }
  const Recommendation& best = *summary.best;
  const ArmSummary& arm = summary.arms[best.arm];
  std::string text = absl::StrCat(
      "recommended: ", best.decided
                           ? setting_of(arm)
                           : "keep the default (no cap is reliably faster)");
  if (best.saved_ms.median > 0) {
    absl::StrAppendFormat(
        &text,
        "\n  fastest in this run: %s, faster in %d of %d rounds,\n"
        "  %s ms less per step than the default (median of the rounds' "
        "differences;\n  quartiles %s to %s)",
        sizes_of(arm).first, best.rounds_faster, summary.rounds,
        readable(best.saved_ms.median), readable(best.saved_ms.p25),
        readable(best.saved_ms.p75));
  }
  // The sign test of a cap that is faster in all rounds.
  const auto num_candidates = static_cast<double>(summary.arms.size() - 1);
  const auto least = static_cast<int64_t>(
      std::ceil(std::log2(num_candidates / kSignificance)));
  if (summary.rounds < least) {
    absl::StrAppendFormat(&text,
                          "\n  too few rounds (%d) to decide between %d caps: "
                          "run again with --rounds %d or more",
                          summary.rounds, summary.arms.size(), least);
  }
  return text;
}

using Json = nlohmann::ordered_json;

Json json(const Quartiles& times) {
  return {{"p25", times.p25}, {"median", times.median}, {"p75", times.p75}};
}

Json json(const ArmSummary& arm) {
  const std::vector<double> bytes(arm.bucket_bytes.begin(),
                                  arm.bucket_bytes.end());
  const std::optional<double> overlap = arm.overlap();
  return {{"cap", arm.label},
          {"caps_bytes", arm.caps_bytes},
          {"buckets", arm.bucket_bytes.size()},
          {"bucket_bytes",
           {{"min", quantile(bytes, 0)},
            {"median", median(bytes)},
            {"max", quantile(bytes, 1)}}},
          {"step_ms", json(arm.step_ms)},
          {"exposed_ms", json(arm.exposed_ms)},
          {"alone_ms", arm.alone_ms},
          {"overlap", overlap ? Json(*overlap) : Json(nullptr)}};
}

Json json_of_best(const SweepSummary& summary) {
  if (!summary.best) return nullptr;
  const Recommendation& best = *summary.best;
  return {{"cap", summary.arms[best.arm].label},
          {"caps_bytes", summary.arms[best.arm].caps_bytes},
          {"saved_ms", json(best.saved_ms)},
          {"saved_share", best.saved_share},
          {"rounds_faster", best.rounds_faster},
          {"rounds", summary.rounds},
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

std::optional<double> ArmSummary::overlap() const {
  if (alone_ms < std::max(kShortestMs, step_ms.p75 - step_ms.p25)) return {};
  return std::clamp(1 - exposed_ms.median / alone_ms, 0.0, 1.0);
}

SweepSummary sweep(const std::vector<at::Tensor>& parameters,
                   const std::function<at::Tensor()>& loss,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const SweepOptions& options) {
  return summarize(measure(parameters, loss, options.sizes, group,
                           options.rounds, options.steps, options.reducer));
}

SweepSummary summarize(const SweepSamples& samples) {
  SweepSummary summary{
      .num_parameters = samples.num_parameters,
      .gradient_bytes = samples.gradient_bytes,
      .rounds = static_cast<int64_t>(samples.local_ms.size()),
      .steps = static_cast<int64_t>(samples.local_ms.front().size()),
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
  std::string text = absl::StrFormat(
      "%s: %d parameters, %s\nstep without communication: %s ms %s\n"
      "cap                buckets  largest  step ms [p25, p75]  exposed  alone "
      "overlap\n",
      name, summary.num_parameters,
      readable_bytes(static_cast<double>(summary.gradient_bytes)),
      readable(summary.local_ms.median), spread(summary.local_ms));
  std::string notes;
  for (const ArmSummary& arm : summary.arms) {
    const auto [size, others] = sizes_of(arm);
    text += row(others.empty() ? size : size + "*", arm);
    if (others.empty()) continue;
    absl::StrAppend(&notes, "* same buckets as ", size, ": ", others, "\n");
  }
  absl::StrAppendFormat(
      &text,
      "%sA bucket's last parameter may exceed the cap.\n"
      "exposed: ms that communication adds to a step; alone: ms of the\n"
      "all-reduces without a step; overlap: share of alone that backward\n"
      "hides, - if alone is too short to tell. Medians of the slowest rank;\n"
      "rounds: %d, steps per round: %d.\n%s\n",
      notes, summary.rounds, summary.steps, recommendation(summary));
  return text;
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
