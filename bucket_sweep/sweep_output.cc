#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "brigade/bucket_sweep/sweep.h"

namespace brigade {
namespace {

constexpr size_t kMostPrintedCaps = 24;

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
      "%-10s %7d %8s  %5s %12s %5s  %5s  %5s %7s\n", size,
      arm.bucket_bytes.size(),
      readable_bytes(static_cast<double>(std::ranges::max(arm.bucket_bytes))),
      readable(arm.step_ms.median), spread(arm.step_ms),
      readable(arm.predicted_ms), readable(std::max(0.0, arm.added_ms.median)),
      readable(arm.alone_ms),
      overlap ? absl::StrFormat("%.0f %%", 100 * *overlap) : "-");
}

std::string setting_of(const ArmSummary& arm) {
  const int64_t bytes = arm.caps_bytes.front();
  if (arm.caps_bytes.size() > kMostPrintedCaps) {
    return absl::StrCat("bucket_cap_mb_list of ", arm.caps_bytes.size(),
                        " caps, in bytes \"caps_bytes\" of the JSON file");
  }
  if (arm.caps_bytes.size() > 1) {
    const auto append_mib = [](std::string* text, int64_t cap) {
      absl::StrAppendFormat(text, "%.17g", static_cast<double>(cap) / 0x1p20);
    };
    return absl::StrCat("bucket_cap_mb_list=[",
                        absl::StrJoin(arm.caps_bytes, ", ", append_mib),
                        "]\n  (C++: bucket_cap_bytes = {",
                        absl::StrJoin(arm.caps_bytes, ", "), "})");
  }
  if (bytes == std::numeric_limits<int64_t>::max()) {
    return "bucket_cap_mb=1e6 (C++: bucket_cap_bytes = {INT64_MAX})";
  }
  return absl::StrFormat("bucket_cap_mb=%.17g (C++: bucket_cap_bytes = {%d})",
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
  if (summary.rounds < summary.least_rounds) {
    absl::StrAppendFormat(&text,
                          "\n  too few rounds (%d) to decide between %d caps: "
                          "run again with --rounds %d or more",
                          summary.rounds, summary.arms.size(),
                          summary.least_rounds);
  }
  return text;
}

using Json = nlohmann::ordered_json;

Json json(const Quartiles& times) {
  return {{"p25", times.p25}, {"median", times.median}, {"p75", times.p75}};
}

Json json(const std::vector<StepPrediction::Collective>& timeline,
          const std::vector<int64_t>& bucket_bytes) {
  Json buckets = Json::array();
  for (size_t b = 0; b < timeline.size(); ++b) {
    buckets.push_back({{"bucket", b},
                       {"bytes", bucket_bytes[b]},
                       {"launched_ms", 1e3 * timeline[b].launched_s},
                       {"complete_ms", 1e3 * timeline[b].complete_s}});
  }
  return buckets;
}

Json json(const ArmSummary& arm, const PlanSamples& plan,
          const BackwardModel& model) {
  const std::vector<double> bytes(arm.bucket_bytes.begin(),
                                  arm.bucket_bytes.end());
  const std::optional<double> overlap = arm.overlap();
  Json sizes = Json::array();
  for (const BucketArm& size : plan.arms) {
    sizes.push_back({{"label", size.label}, {"caps_bytes", size.caps_bytes}});
  }
  return {{"cap", arm.label},
          {"caps_bytes", arm.caps_bytes},
          {"sizes", std::move(sizes)},
          {"buckets", arm.bucket_bytes.size()},
          {"bucket_bytes",
           {{"min", quantile(bytes, 0)},
            {"median", quantile(bytes, 0.5)},
            {"max", quantile(bytes, 1)}}},
          {"plan", plan.buckets},
          {"step_ms", json(arm.step_ms)},
          {"rounds_ms", plan.rounds_ms},
          {"predicted_ms", arm.predicted_ms},
          {"added_ms", json(arm.added_ms)},
          {"alone_ms", arm.alone_ms},
          {"alone_rounds_ms", plan.alone_ms},
          {"overlap", overlap ? Json(*overlap) : Json(nullptr)},
          {"timeline", json(plan.timeline, arm.bucket_bytes)},
          {"predicted_timeline",
           json(prediction_of(plan, model).buckets, arm.bucket_bytes)}};
}

Json json_of_ready(const SweepSamples& samples) {
  const Backward& backward = samples.model.backward;
  Json ready = Json::array();
  for (size_t i = 0; i < backward.order.size(); ++i) {
    const size_t parameter = backward.order[i];
    const ParameterSpec& spec = backward.parameters[parameter];
    ready.push_back(
        {{"parameter", parameter},
         {"name",
          parameter < samples.names.size() ? samples.names[parameter] : ""},
         {"bytes", spec.size_bytes},
         {"kind", spec.kind},
         {"sparse", spec.sparse},
         {"ready_ms", 1e3 * backward.ready_s[i]}});
  }
  return ready;
}

Json json(const std::vector<CostPoint>& points) {
  Json array = Json::array();
  for (const CostPoint& point : points) {
    array.push_back({{"bytes", point.bytes}, {"seconds", point.seconds}});
  }
  return array;
}

// Throws nlohmann::json::exception for another text.
SweepSamples samples_of(const Json& found) {
  // Values that may throw are read into complete objects: in the initializer of
  // an aggregate, GCC 12 would destroy its strings and vectors twice.
  SweepSamples samples;
  found.at("ranks").get_to(samples.num_ranks);
  found.at("rounds").get_to(samples.rounds);
  found.at("steps").get_to(samples.steps);
  found.at("forward_ms").get_to(samples.forward_ms);
  found.at("local_rounds_ms").get_to(samples.local_ms);
  Backward& backward = samples.model.backward;
  const Json& ready = found.at("ready");
  backward.parameters.resize(ready.size());
  samples.names.resize(ready.size());
  backward.end_s = 1e-3 * found.at("backward_ms").get<double>();
  backward.contention = {.backward_slowdown = found.at("backward_slowdown"),
                         .collective_stretch = found.at("collective_stretch")};
  for (const Json& gradient : ready) {
    const size_t parameter = gradient.at("parameter");
    backward.order.push_back(parameter);
    backward.ready_s.push_back(1e-3 * gradient.at("ready_ms").get<double>());
    samples.names.at(parameter) = gradient.at("name");
    backward.parameters.at(parameter) = {.size_bytes = gradient.at("bytes"),
                                         .kind = gradient.at("kind"),
                                         .sparse = gradient.at("sparse")};
  }
  samples.model.delivery_s = 1e-3 * found.at("delivery_ms").get<double>();
  for (const Json& point : found.at("cost").at("points")) {
    samples.model.points.push_back(
        {.bytes = point.at("bytes"), .seconds = point.at("seconds")});
  }
  for (const Json& arm : found.at("arms")) {
    PlanSamples& plan = samples.plans.emplace_back();
    for (const Json& size : arm.at("sizes")) {
      BucketArm& read = plan.arms.emplace_back();
      size.at("label").get_to(read.label);
      size.at("caps_bytes").get_to(read.caps_bytes);
    }
    arm.at("plan").get_to(plan.buckets);
    const absl::Status valid =
        BucketPlan::create(plan.buckets, ready.size()).status();
    if (!valid.ok()) throw std::invalid_argument(std::string(valid.message()));
    arm.at("rounds_ms").get_to(plan.rounds_ms);
    arm.at("alone_rounds_ms").get_to(plan.alone_ms);
    for (const Json& bucket : arm.at("timeline")) {
      plan.timeline.push_back(
          {.launched_s = 1e-3 * bucket.at("launched_ms").get<double>(),
           .complete_s = 1e-3 * bucket.at("complete_ms").get<double>()});
    }
  }
  return samples;
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

std::string to_text(const std::string& name, const SweepSummary& summary) {
  std::string text = absl::StrFormat(
      "%s: %d parameters, %s\nstep without communication: %s ms %s\n"
      "cap        buckets  largest  step ms [p25, p75] model  added  alone "
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
      "%sA bucket's last parameter may exceed the cap. planned: buckets for "
      "this\nmodel and these links. model: predicted step%s %s ms.\n"
      "added: ms that communication adds to a step; alone: ms of the\n"
      "all-reduces without a step; overlap: share of alone that backward\n"
      "hides, - if alone is too short to tell. Medians of the slowest rank;\n"
      "rounds: %d, steps per round: %d.\n%s\n",
      notes,
      summary.is_model_off ? ", unreliable: steps are\nfaster than its bound of"
                           : "; no plan is below",
      readable(summary.bound_ms), summary.rounds, summary.steps,
      recommendation(summary));
  return text;
}

std::string to_json(const std::string& name, const SweepSamples& samples) {
  const SweepSummary summary = summarize(samples);
  const Contention& contention = samples.model.backward.contention;
  Json arms = Json::array();
  for (size_t i = 0; i < summary.arms.size(); ++i) {
    arms.push_back(json(summary.arms[i], samples.plans[i], samples.model));
  }
  return Json{{"name", name},
              {"parameters", summary.num_parameters},
              {"gradient_bytes", summary.gradient_bytes},
              {"ranks", samples.num_ranks},
              {"rounds", samples.rounds},
              {"rounds_taken", summary.rounds},
              {"rounds_to_take", rounds_to_take(samples)},
              {"steps", summary.steps},
              {"local_ms", json(summary.local_ms)},
              {"local_rounds_ms", samples.local_ms},
              {"bound_ms", summary.bound_ms},
              {"is_model_off", summary.is_model_off},
              {"arms", std::move(arms)},
              {"best", json_of_best(summary)},
              {"recommendation", recommendation(summary)},
              {"cost",
               {{"points", json(samples.model.points)},
                {"concurrency", samples.model.cost.concurrency()}}},
              {"backward_ms", 1e3 * samples.model.backward.end_s},
              {"forward_ms", samples.forward_ms},
              {"delivery_ms", 1e3 * samples.model.delivery_s},
              {"backward_slowdown", contention.backward_slowdown},
              {"collective_stretch", contention.collective_stretch},
              {"ready", json_of_ready(samples)}}
      .dump(2, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

absl::StatusOr<SweepSamples> samples_from_json(std::string_view text) {
  const auto error = [](absl::string_view found) {
    return absl::InvalidArgumentError(absl::StrCat(
        "bucket sweep: expected the JSON text of an earlier sweep, found ",
        found, ".\nStart a new sweep."));
  };
  SweepSamples samples;
  try {
    samples = samples_of(Json::parse(text));
  } catch (const std::exception& wrong) {
    return error(wrong.what());
  }
  absl::StatusOr<CollectiveCost> cost =
      CollectiveCost::fit(samples.model.points);
  if (!cost.ok()) return error(cost.status().message());
  samples.model.cost = *std::move(cost);
  if (absl::Status status = check_backward(samples.model.backward);
      !status.ok()) {
    return error(status.message());
  }
  const size_t rounds = samples.local_ms.size();
  const auto is_full = [rounds](const std::vector<std::vector<double>>& times) {
    return times.size() == rounds &&
           std::ranges::none_of(times, &std::vector<double>::empty);
  };
  const auto is_valid = [&](const PlanSamples& plan) {
    const bool has_caps = std::ranges::none_of(
        plan.arms, [](const BucketArm& arm) { return arm.caps_bytes.empty(); });
    return !plan.arms.empty() && has_caps && is_full(plan.rounds_ms) &&
           plan.alone_ms.size() == rounds &&
           plan.timeline.size() <= plan.buckets.size();
  };
  const bool is_whole = rounds > 0 && samples.rounds > 0 &&
                        is_full(samples.local_ms) && !samples.plans.empty() &&
                        std::ranges::all_of(samples.plans, is_valid);
  if (!is_whole) return error("rounds or plans that are not complete");
  return samples;
}

}  // namespace brigade
