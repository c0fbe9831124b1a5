#include "brigade/bucket_sweep/sweep.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/reducer/reducer.h"

namespace brigade {
namespace {

constexpr double kBytesPerMib = 1024.0 * 1024.0;
constexpr double kLargestMib = 1e6;

using Clock = std::chrono::steady_clock;

// The reducer plans its buckets after the first step, with a static graph after
// the second.
constexpr int kStepsUntilRebuilt = 3;

constexpr int kProfiledSteps = 5;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin)
      .count();
}

class Training {
 public:
  Training(const std::vector<at::Tensor>& parameters,
           const std::function<at::Tensor()>& loss,
           const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           const ReducerOptions& options)
      : loss_(loss), group_(group), options_(options) {
    std::ranges::copy_if(parameters, std::back_inserter(parameters_),
                         &at::Tensor::requires_grad);
    TORCH_CHECK_VALUE(!parameters_.empty(),
                      "bucket sweep: expected a parameter with requires_grad, "
                      "found none.\nPass a model with trainable parameters.");
    profiler_.emplace(parameters_, options_.expect_sparse_gradients, group_);
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  // Plans the arm's buckets. Adds the plan, or the arm to an equal plan.
  void add_arm(std::vector<PlanSamples>& plans, const BucketArm& arm) {
    Reducer reducer(parameters_, group_, options_of(arm));
    for (int step = 0; step < kStepsUntilRebuilt; ++step) timed_step(&reducer);
    const std::vector<std::vector<size_t>>& buckets = reducer.plan().buckets();
    const auto same = std::ranges::find(plans, buckets, &PlanSamples::buckets);
    if (same != plans.end()) {
      same->arms.push_back(arm);
    } else {
      plans.push_back({.arms = {arm},
                       .buckets = buckets,
                       .bucket_bytes = bytes_of(buckets)});
    }
    drop_gradients();
  }

  // Profiles some steps, and times all-reduces.
  BackwardModel make_model() {
    const bool is_cpu = parameters_.front().device().is_cpu();
    Reducer reducer(parameters_, group_,
                    options_of(is_cpu ? default_arm() : arm_of("each")));
    for (int step = 0; step < kStepsUntilRebuilt; ++step) timed_step(&reducer);
    for (int step = 0; step < kProfiledSteps; ++step) {
      timed_step(&reducer);
      profiler_->add(reducer.timeline(), reducer.plan());
    }
    drop_gradients();
    return profiler_->model();
  }

  void run_turn(PlanSamples& plan, int64_t num_steps) {
    if (plan.buckets.empty()) return time_steps(plan, num_steps, nullptr);
    {
      ReducerOptions options = options_;
      options.bucket_plan = plan.buckets;
      Reducer reducer(parameters_, group_, options);
      time_steps(plan, num_steps, &reducer);
    }
    plan.alone_ms.push_back(all_reduce_alone(plan));
  }

  void take_slowest(std::vector<double>& samples) const {
    profiler_->take_slowest(samples);
  }

 private:
  ReducerOptions options_of(const BucketArm& arm) const {
    ReducerOptions options = options_;
    options.bucket_plan = {};
    options.bucket_cap_bytes = arm.caps_bytes;
    return options;
  }

  void drop_gradients() const {
    for (const at::Tensor& parameter : parameters_) {
      parameter.mutable_grad().reset();
    }
  }

  double timed_step(Reducer* reducer) const {
    drop_gradients();
    profiler_->barrier();
    const Clock::time_point begin = Clock::now();
    const at::Tensor loss = loss_();
    TORCH_CHECK_VALUE(loss.numel() == 1,
                      "bucket sweep: expected a loss of one element, found "
                      "shape ",
                      loss.sizes(), ".\nReturn its mean or its sum.");
    if (reducer != nullptr) reducer->prepare_for_backward(loss);
    loss.backward();
    profiler_->synchronize();
    return ms_since(begin);
  }

  void time_steps(PlanSamples& plan, int64_t num_steps, Reducer* reducer) {
    timed_step(reducer);  // warm-up
    std::vector<double>& times = plan.rounds_ms.emplace_back();
    for (int64_t step = 0; step < num_steps; ++step) {
      times.push_back(timed_step(reducer));
    }
    drop_gradients();
  }

  std::vector<int64_t> bytes_of(
      const std::vector<std::vector<size_t>>& buckets) const {
    std::vector<int64_t> bytes;
    for (const std::vector<size_t>& bucket : buckets) {
      bytes.push_back(0);
      for (const size_t i : bucket) {
        bytes.back() += static_cast<int64_t>(parameters_[i].nbytes());
      }
    }
    return bytes;
  }

  double all_reduce_alone(const PlanSamples& plan) const {
    std::vector<at::Tensor> buffers;
    for (size_t b = 0; b < plan.buckets.size(); ++b) {
      const at::Tensor& like = parameters_[plan.buckets[b].front()];
      buffers.push_back(at::zeros(
          {plan.bucket_bytes[b] / static_cast<int64_t>(like.element_size())},
          like.options()));
    }
    return 1e3 * profiler_->all_reduce(buffers, /*at_once=*/false);
  }

  std::vector<at::Tensor> parameters_;
  const std::function<at::Tensor()>& loss_;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group_;
  const ReducerOptions& options_;
  std::optional<BackwardProfiler> profiler_;
};

// Significance level: the probability of recommending a size that is no better.
constexpr double kSignificance = 0.05;

// Shorter communication has no measurable overlap.
constexpr double kShortestMs = 0.1;

constexpr size_t kMostPrintedCaps = 24;

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

std::vector<double> added(const Rounds& rounds, const Rounds& local) {
  std::vector<double> differences;
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (const double time : rounds[i]) {
      differences.push_back(time - median(local[i]));
    }
  }
  return differences;
}

// Returns the time of a step that ends `end_s` after the begin of backward.
double step_ms(const SweepSummary& summary, const BackwardModel& model,
               double end_s) {
  return summary.local_ms.median + 1e3 * (end_s - model.backward.end_s);
}

double predicted_ms(const SweepSummary& summary, const BackwardModel& model,
                    const PlanSamples& plan) {
  const BucketPlan given = value_or_throw(
      BucketPlan::create(plan.buckets, model.backward.order.size()));
  const StepPrediction prediction =
      value_or_throw(predict(given, model.backward, model.cost));
  return step_ms(summary, model, prediction.end_s());
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
          .added_ms = quartiles(added(plan.rounds_ms, local)),
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
      absl::StrAppendFormat(text, "%.8g", static_cast<double>(cap) / 0x1p20);
    };
    return absl::StrCat("bucket_cap_mb_list=[",
                        absl::StrJoin(arm.caps_bytes, ", ", append_mib),
                        "]\n  (C++: bucket_cap_bytes = {",
                        absl::StrJoin(arm.caps_bytes, ", "), "})");
  }
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
          {"predicted_ms", arm.predicted_ms},
          {"added_ms", json(arm.added_ms)},
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
  return std::clamp(1 - added_ms.median / alone_ms, 0.0, 1.0);
}

BucketArm default_arm() {
  return {.label = "default",
          .caps_bytes = {kDefaultBucketCapsBytes.begin(),
                         kDefaultBucketCapsBytes.end()}};
}

BucketArm arm_of(std::string_view size) {
  if (size == "each") return {.label = "each", .caps_bytes = {1}};
  if (size == "one") {
    return {.label = "one",
            .caps_bytes = {std::numeric_limits<int64_t>::max()}};
  }
  double mib = 0;
  const bool is_number =
      absl::SimpleAtod(absl::string_view(size.data(), size.size()), &mib);
  TORCH_CHECK_VALUE(
      is_number && mib > 0 && mib <= kLargestMib,
      "bucket sweep: expected a size of more than 0 MiB, 'one' or 'each', "
      "found '",
      std::string(size), "'.\nPass a number, for example 25.");
  const auto bytes = static_cast<int64_t>(mib * kBytesPerMib);
  return {.label = absl::StrCat(mib, " MiB"),
          .caps_bytes = {std::max<int64_t>(1, bytes)}};
}

BucketArm planned_arm(const BackwardModel& model) {
  const BucketPlan plan =
      value_or_throw(plan_for_cost(model.backward, model.cost));
  // The k-th cap holds for the k-th bucket of each kind.
  std::map<int, size_t> num_buckets;
  BucketArm arm = {.label = "planned", .caps_bytes = {}};
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    const ParameterSpec& first = model.backward.parameters[bucket.front()];
    if (first.sparse) continue;
    int64_t bytes = 0;
    for (const size_t i : bucket) {
      bytes += model.backward.parameters[i].size_bytes;
    }
    const size_t k = num_buckets[first.kind]++;
    if (k == arm.caps_bytes.size()) arm.caps_bytes.push_back(1);
    arm.caps_bytes[k] = std::max(arm.caps_bytes[k], bytes);
  }
  if (arm.caps_bytes.empty()) arm.caps_bytes = {1};
  return arm;
}

SweepSamples measure(const std::vector<at::Tensor>& parameters,
                     const std::function<at::Tensor()>& loss,
                     const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                     const SweepOptions& options) {
  TORCH_CHECK_VALUE(options.rounds > 0 && options.steps > 0,
                    "bucket sweep: expected at least 1 round and 1 step, found "
                    "rounds = ",
                    options.rounds, " and steps = ", options.steps,
                    ".\nOmit them to use the defaults.");
  std::vector<BucketArm> arms = {default_arm()};
  for (const std::string& size : options.sizes) arms.push_back(arm_of(size));
  TORCH_CHECK_VALUE(
      group->getSize() > 1,
      "bucket sweep: expected at least 2 ranks, found 1: nothing is "
      "communicated.\nStart more, for example with torchrun --standalone "
      "--nproc-per-node 2 -m brigade.bench ...");
  Training training(parameters, loss, group, options.reducer);

  SweepSamples samples;
  samples.num_parameters = static_cast<int64_t>(training.parameters().size());
  for (const at::Tensor& parameter : training.parameters()) {
    samples.gradient_bytes += static_cast<int64_t>(parameter.nbytes());
  }
  samples.model = training.make_model();
  arms.push_back(planned_arm(samples.model));
  for (const BucketArm& arm : arms) {
    training.add_arm(samples.plans, arm);
  }

  PlanSamples local;
  std::vector<PlanSamples*> order = {&local};
  for (PlanSamples& plan : samples.plans) order.push_back(&plan);
  for (int64_t round = 0; round < options.rounds; ++round) {
    for (PlanSamples* const plan : order) {
      training.run_turn(*plan, options.steps);
    }
    std::ranges::reverse(order);
  }

  for (PlanSamples* const plan : order) {
    for (std::vector<double>& times : plan->rounds_ms) {
      training.take_slowest(times);
    }
    training.take_slowest(plan->alone_ms);
  }
  samples.local_ms = std::move(local.rounds_ms);
  return samples;
}

SweepSummary sweep(const std::vector<at::Tensor>& parameters,
                   const std::function<at::Tensor()>& loss,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const SweepOptions& options) {
  return summarize(measure(parameters, loss, group, options));
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
    summary.arms.back().predicted_ms =
        predicted_ms(summary, samples.model, plan);
  }
  summary.bound_ms =
      step_ms(summary, samples.model,
              earliest_end_s(samples.model.backward, samples.model.cost));
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
      "this\nmodel and these links. model: predicted step; no plan is below "
      "%s ms.\n"
      "added: ms that communication adds to a step; alone: ms of the\n"
      "all-reduces without a step; overlap: share of alone that backward\n"
      "hides, - if alone is too short to tell. Medians of the slowest rank;\n"
      "rounds: %d, steps per round: %d.\n%s\n",
      notes, readable(summary.bound_ms), summary.rounds, summary.steps,
      recommendation(summary));
  return text;
}

std::string to_json(const std::string& name, const SweepSummary& summary) {
  Json arms = Json::array();
  for (const ArmSummary& arm : summary.arms) arms.push_back(json(arm));
  return Json{{"name", name},
              {"parameters", summary.num_parameters},
              {"gradient_bytes", summary.gradient_bytes},
              {"local_ms", json(summary.local_ms)},
              {"bound_ms", summary.bound_ms},
              {"arms", std::move(arms)},
              {"best", json_of_best(summary)},
              {"recommendation", recommendation(summary)}}
      .dump(2);
}

}  // namespace brigade
