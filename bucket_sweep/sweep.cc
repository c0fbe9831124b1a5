#include "brigade/bucket_sweep/sweep.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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
    profiler_->connect();
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t num_ranks() const { return group_->getSize(); }

  // Plans the arm's buckets. Adds the plan, or the arm to an equal plan.
  void add_arm(SweepSamples& samples, const BucketArm& arm) {
    std::vector<PlanSamples>& plans = samples.plans;
    Reducer reducer(parameters_, group_, options_of(arm));
    for (int step = 0; step < kStepsUntilRebuilt; ++step) timed_step(&reducer);
    const std::vector<std::vector<size_t>>& buckets = reducer.plan().buckets();
    const auto same = std::ranges::find(plans, buckets, &PlanSamples::buckets);
    if (same != plans.end()) {
      same->arms.push_back(arm);
    } else {
      plans.push_back({.arms = {arm}, .buckets = buckets});
    }
    drop_gradients();
  }

  // Profiles some steps, and times all-reduces.
  BackwardModel make_model() {
    // The first steps of a process are slow.
    profile(options_of(default_arm()), [](const Reducer&) {});
    profile(options_of(default_arm()), [&](const Reducer& reducer) {
      profiler_->add_overlapped(reducer.timeline(), reducer.plan());
    });
    ReducerOptions alone = options_;
    alone.bucket_plan = profiler_->buckets();
    profile(alone, [&](const Reducer& reducer) {
      profiler_->add(reducer.timeline());
    });
    drop_gradients();
    return profiler_->model();
  }

  // Times some forwards.
  double forward_ms() const {
    std::vector<double> times;
    for (int step = 0; step < kProfiledSteps; ++step) {
      profiler_->barrier();
      const Clock::time_point begin = Clock::now();
      loss_();
      profiler_->synchronize();
      times.push_back(ms_since(begin));
    }
    profiler_->take_slowest(times);
    return quantile(times, 0.5);
  }

  // Adds a round of `num_steps` steps, without communication if `reducer` is
  // null.
  void time_steps(std::vector<std::vector<double>>& rounds_ms,
                  int64_t num_steps, Reducer* reducer) {
    timed_step(reducer);  // warm-up
    std::vector<double>& times = rounds_ms.emplace_back();
    for (int64_t step = 0; step < num_steps; ++step) {
      times.push_back(timed_step(reducer));
    }
    drop_gradients();
    profiler_->take_slowest(times);
  }

  // Adds a round of `num_steps` steps with the plan.
  void run_turn(PlanSamples& plan, int64_t num_steps) {
    {
      ReducerOptions options = options_;
      options.bucket_plan = plan.buckets;
      Reducer reducer(parameters_, group_, options);
      time_steps(plan.rounds_ms, num_steps, &reducer);
      plan.timeline = timeline_of(reducer);
    }
    std::vector<double> alone_ms = {all_reduce_alone(plan)};
    profiler_->take_slowest(alone_ms);
    plan.alone_ms.push_back(alone_ms[0]);
  }

 private:
  ReducerOptions options_of(const BucketArm& arm) const {
    ReducerOptions options = options_;
    options.bucket_plan = {};
    options.bucket_cap_bytes = arm.caps_bytes;
    return options;
  }

  void profile(const ReducerOptions& options,
               const std::function<void(const Reducer&)>& add) const {
    Reducer reducer(parameters_, group_, options);
    for (int step = 0; step < kStepsUntilRebuilt; ++step) timed_step(&reducer);
    for (int step = 0; step < kProfiledSteps; ++step) {
      timed_step(&reducer);
      add(reducer);
    }
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

  // Times of the last step's buckets on the slowest rank.
  std::vector<StepPrediction::Collective> timeline_of(
      const Reducer& reducer) const {
    const Timeline timeline = reducer.timeline();
    std::vector<double> seconds;
    for (const UnitTimes& unit : timeline.units) {
      for (const int64_t ns : {unit.launch_ns, unit.complete_ns}) {
        seconds.push_back(1e-9 * static_cast<double>(std::max<int64_t>(
                                     0, ns - timeline.backward_begin_ns)));
      }
    }
    profiler_->take_slowest(seconds);
    std::vector<StepPrediction::Collective> collectives;
    for (size_t i = 0; i < seconds.size(); i += 2) {
      collectives.push_back(
          {.launched_s = seconds[i], .complete_s = seconds[i + 1]});
    }
    return collectives;
  }

  double all_reduce_alone(const PlanSamples& plan) const {
    std::vector<at::Tensor> buffers;
    for (const std::vector<size_t>& bucket : plan.buckets) {
      int64_t numel = 0;
      for (const size_t i : bucket) numel += parameters_[i].numel();
      buffers.push_back(
          at::zeros({numel}, parameters_[bucket.front()].options()));
    }
    return 1e3 * profiler_->all_reduce(buffers, /*at_once=*/false);
  }

  std::vector<at::Tensor> parameters_;
  const std::function<at::Tensor()>& loss_;
  const c10::intrusive_ptr<c10d::ProcessGroup>& group_;
  const ReducerOptions& options_;
  std::optional<BackwardProfiler> profiler_;
};

// Probabilities of recommending an arm that is no better: after the rounds
// asked for, and after three times as many.
constexpr double kFirstLevel = 0.04;
constexpr double kSecondLevel = 0.01;
constexpr int64_t kMostRounds = 3;     // times the rounds asked for
constexpr double kWorthRounds = 0.01;  // saved share of a step

// A step that is faster than this times the bound belies the model.
constexpr double kModelOff = 0.97;

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

std::vector<double> added(const Rounds& rounds, const Rounds& local) {
  std::vector<double> differences;
  for (size_t i = 0; i < rounds.size(); ++i) {
    for (const double time : rounds[i]) {
      differences.push_back(time - median(local[i]));
    }
  }
  return differences;
}

// `end_s`: of the last collective, after the begin of backward.
double step_ms(const SweepSamples& samples, double end_s) {
  return samples.forward_ms + 1e3 * (end_s + samples.model.delivery_s);
}

ArmSummary summary_of(const PlanSamples& plan, const Rounds& local) {
  const auto append_label = [](std::string* text, const BucketArm& arm) {
    text->append(arm.label);
  };
  return {.label = absl::StrJoin(plan.arms, ", ", append_label),
          .caps_bytes = plan.arms.front().caps_bytes,
          .step_ms = quartiles(flat(plan.rounds_ms)),
          .added_ms = quartiles(added(plan.rounds_ms, local)),
          .alone_ms = median(plan.alone_ms)};
}

// Returns the probability that a fair coin shows at least `heads` heads.
double binomial_tail(int64_t heads, int64_t throws) {
  double tail = 0;
  for (int64_t k = heads; k <= throws; ++k) {
    const double log_ways = std::lgamma(throws + 1) - std::lgamma(k + 1) -
                            std::lgamma(throws - k + 1);
    tail += std::exp(log_ways - static_cast<double>(throws) * std::log(2));
  }
  return tail;
}

double num_candidates(const SweepSamples& samples) {
  return static_cast<double>(samples.plans.size() - 1);
}

double level(int64_t rounds_asked_for, int64_t rounds) {
  return rounds > rounds_asked_for ? kSecondLevel : kFirstLevel;
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
  found.decided = num_candidates(samples) *
                      binomial_tail(found.rounds_faster,
                                    static_cast<int64_t>(saved.size())) <=
                  level(samples.rounds, static_cast<int64_t>(saved.size()));
  return found;
}

std::optional<Recommendation> fastest(const SweepSamples& samples) {
  std::optional<Recommendation> best;
  for (size_t arm = 1; arm < samples.plans.size(); ++arm) {
    const Recommendation found = compare(samples, arm);
    const auto merit = [](const Recommendation& of) {
      return std::pair(of.decided, of.saved_ms.median);
    };
    if (!best || merit(found) > merit(*best)) best = found;
  }
  return best;
}

// Returns the rounds after which an arm that is faster in each is decided.
int64_t least_rounds(double candidates, double level) {
  return candidates == 0
             ? 0
             : static_cast<int64_t>(std::ceil(std::log2(candidates / level)));
}

int64_t num_rounds(const SweepSamples& samples) {
  return static_cast<int64_t>(samples.local_ms.size());
}

SweepSamples first_samples(Training& training, std::vector<BucketArm> arms,
                           const SweepOptions& options) {
  SweepSamples samples;
  samples.num_ranks = training.num_ranks();
  samples.names = options.reducer.parameter_names;
  samples.rounds = options.rounds;
  samples.steps = options.steps;
  samples.model = training.make_model();
  samples.forward_ms = training.forward_ms();
  arms.push_back(planned_arm(samples.model));
  for (const BucketArm& arm : arms) training.add_arm(samples, arm);
  return samples;
}

SweepSamples checked(const SweepSamples& resumed, const Training& training,
                     const std::vector<BucketArm>& arms,
                     const SweepOptions& options) {
  std::vector<std::string> found;
  for (const PlanSamples& plan : resumed.plans) {
    for (const BucketArm& arm : plan.arms) found.push_back(arm.label);
  }
  std::vector<std::string> expected = {"planned"};
  for (const BucketArm& arm : arms) expected.push_back(arm.label);
  std::ranges::sort(found);
  std::ranges::sort(expected);
  const std::vector<ParameterSpec>& known = resumed.model.backward.parameters;
  const bool fits =
      found == expected && resumed.num_ranks == training.num_ranks() &&
      resumed.rounds == options.rounds && resumed.steps == options.steps &&
      std::ranges::equal(known, training.parameters(), {},
                         &ParameterSpec::size_bytes,
                         [](const at::Tensor& parameter) {
                           return static_cast<int64_t>(parameter.nbytes());
                         });
  TORCH_CHECK_VALUE(fits,
                    "bucket sweep: expected the ranks, parameters, sizes, "
                    "rounds and steps of "
                    "the sweep to continue, found ",
                    resumed.num_ranks, " ranks, ", known.size(),
                    " parameters, sizes ", absl::StrJoin(found, ", "), ", ",
                    resumed.rounds, " rounds of ", resumed.steps,
                    " steps there.\nPass the same ones, or start a new sweep.");
  return resumed;
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
      value_or_throw(plan_for_cost(model.backward, model.cost, kPlanSlack));
  // The k-th cap holds for the k-th bucket of each kind.
  std::map<int, size_t> num_buckets;
  BucketArm arm = {.label = "planned", .caps_bytes = {}};
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    const ParameterSpec& first = model.backward.parameters[bucket.front()];
    if (first.sparse) continue;
    const size_t k = num_buckets[first.kind]++;
    if (k == arm.caps_bytes.size()) arm.caps_bytes.push_back(1);
    arm.caps_bytes[k] = std::max(arm.caps_bytes[k],
                                 bytes_of(bucket, model.backward.parameters));
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
      "--nproc-per-node 2 -m brigade bench ...");
  Training training(parameters, loss, group, options.reducer);
  SweepSamples samples =
      options.resumed ? checked(*options.resumed, training, arms, options)
                      : first_samples(training, arms, options);
  int64_t round = num_rounds(samples);
  while (round < rounds_to_take(samples)) {
    // Every second round is in reverse order.
    const bool forth = round % 2 == 0;
    if (forth) training.time_steps(samples.local_ms, options.steps, nullptr);
    for (size_t i = 0; i < samples.plans.size(); ++i) {
      training.run_turn(samples.plans[forth ? i : samples.plans.size() - 1 - i],
                        options.steps);
    }
    if (!forth) training.time_steps(samples.local_ms, options.steps, nullptr);
    ++round;
    if (options.after_round) options.after_round(samples);
  }
  return samples;
}

int64_t rounds_to_take(const SweepSamples& samples) {
  const int64_t most = kMostRounds * samples.rounds;
  const int64_t taken = num_rounds(samples);
  if (taken != samples.rounds)
    return taken < samples.rounds ? samples.rounds : most;
  const std::optional<Recommendation> best = fastest(samples);
  const bool is_worth =
      best && !best->decided && best->saved_share > kWorthRounds &&
      most >= least_rounds(num_candidates(samples), kSecondLevel);
  return is_worth ? most : samples.rounds;
}

SweepSummary sweep(const std::vector<at::Tensor>& parameters,
                   const std::function<at::Tensor()>& loss,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const SweepOptions& options) {
  return summarize(measure(parameters, loss, group, options));
}

StepPrediction prediction_of(const PlanSamples& plan,
                             const BackwardModel& model) {
  const BucketPlan given = value_or_throw(
      BucketPlan::create(plan.buckets, model.backward.order.size()));
  return value_or_throw(predict(given, model.backward, model.cost));
}

SweepSummary summarize(const SweepSamples& samples) {
  SweepSummary summary{
      .num_parameters =
          static_cast<int64_t>(samples.model.backward.order.size()),
      .gradient_bytes = bytes_of(samples.model.backward.order,
                                 samples.model.backward.parameters),
      .rounds = static_cast<int64_t>(samples.local_ms.size()),
      .steps = static_cast<int64_t>(samples.local_ms.front().size()),
      .local_ms = quartiles(flat(samples.local_ms))};
  for (const PlanSamples& plan : samples.plans) {
    ArmSummary& arm =
        summary.arms.emplace_back(summary_of(plan, samples.local_ms));
    for (const std::vector<size_t>& bucket : plan.buckets) {
      arm.bucket_bytes.push_back(
          bytes_of(bucket, samples.model.backward.parameters));
    }
    arm.predicted_ms =
        step_ms(samples, prediction_of(plan, samples.model).end_s());
  }
  summary.bound_ms = step_ms(
      samples, earliest_end_s(samples.model.backward, samples.model.cost));
  for (const ArmSummary& arm : summary.arms) {
    summary.is_model_off |= arm.step_ms.median < kModelOff * summary.bound_ms;
  }
  summary.best = fastest(samples);
  summary.least_rounds = least_rounds(num_candidates(samples),
                                      level(samples.rounds, summary.rounds));
  return summary;
}

}  // namespace brigade
