#include "brigade/reducer/auto_plan.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <iostream>
#include <memory>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"

namespace brigade {
namespace {

// From the begin of backward to the delivery; on devices, to the last
// collective's end.
double seconds_of(const Timeline& timeline, bool is_cpu) {
  int64_t end_ns = is_cpu ? timeline.finalize_end_ns : 0;
  for (const UnitTimes& unit : timeline.units) {
    end_ns = std::max(end_ns, unit.complete_ns);
  }
  return 1e-9 * static_cast<double>(
                    std::max<int64_t>(0, end_ns - timeline.backward_begin_ns));
}

// Of each plan. All are among the first iterations, which are always sampled.
constexpr size_t kTimedSteps = 2;

// The plan is made again if a step takes this times as long as the median of
// the first checks, or as short, in consecutive checks.
constexpr size_t kReferences = 3;
constexpr double kDrift = 1.5;
constexpr int kDriftedChecks = 2;

}  // namespace

AutoPlan::AutoPlan(Reducer& reducer, std::vector<at::Tensor> parameters,
                   std::vector<bool> sparse,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   int64_t watched_steps)
    : reducer_(reducer),
      profiler_(parameters, std::move(sparse), group),
      is_cpu_(parameters.front().device().is_cpu()),
      is_rank_0_(group->getRank() == 0),
      watched_steps_(watched_steps),
      hook_(reducer.comm_hook()),
      buckets_(reducer.plan().buckets()) {
  TORCH_CHECK_VALUE(!reducer.hook_steps_parameters(),
                    "automatic bucket plan: expected a comm hook without "
                    "optimizer steps, found step_in_backward().\nLeave out one "
                    "of them.");
}

std::shared_ptr<const AutoPlan> AutoPlan::attach(
    Reducer& reducer, std::vector<at::Tensor> parameters,
    std::vector<bool> sparse,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    int64_t watched_steps) {
  const auto made = std::make_shared<AutoPlan>(
      reducer, std::move(parameters), std::move(sparse), group, watched_steps);
  reducer.call_after_iterations([made] { made->after_iteration(); });
  return made;
}

// All ranks change the stage in the same call: their counts are equal.
void AutoPlan::after_iteration() {
  if (is_stopped_) return;
  const bool was_done = is_done();
  const ReducerStatistics counts = reducer_.statistics();
  const int64_t num_begun = counts.begun;
  const bool is_last = num_begun >= num_begun_ + num_steps_;
  if (is_last && !is_cpu_) reducer_.await_statuses();
  if (!was_done) note_step();
  if (!is_last) return;
  num_begun_ = num_begun;
  const bool has_other_buckets =
      counts.rebuilds == num_rebuilds_ && reducer_.plan().buckets() != buckets_;
  if (has_other_buckets || reducer_.comm_hook() != hook_) return stop();
  try {
    next_stage();
    buckets_ = reducer_.plan().buckets();
    num_rebuilds_ = reducer_.statistics().rebuilds;
  } catch (...) {
    reducer_.abort_group();
    throw_peer_error("automatic bucket plan", std::current_exception());
  }
  if (!is_done() || was_done) return;
  if (is_rank_0_) std::clog << "brigade: " << report_ << std::endl;
  num_steps_ = watched_steps_;
  if (sample_rate_) reducer_.set_timeline_sample_rate(*sample_rate_);
  sample_rate_.reset();
}

void AutoPlan::stop() {
  is_stopped_ = true;
  stage_ = Stage::kDone;
  report_ = "stopped: the program has set buckets or a comm hook";
  if (sample_rate_) reducer_.set_timeline_sample_rate(*sample_rate_);
}

void AutoPlan::next_stage() {
  switch (stage_) {
    case Stage::kLearn: {
      reducer_.rebuild_buckets();
      default_ = reducer_.plan().buckets();
      reducer_.set_bucket_plan(profiler_.buckets());
      stage_ = Stage::kProfile;
      num_steps_ = is_cpu_ ? 2 : 1;
      return;
    }
    case Stage::kProfile:
      return plan();
    case Stage::kTimePlanned:
      reducer_.set_bucket_plan(default_);
      stage_ = Stage::kTimeDefault;
      return;
    case Stage::kTimeDefault:
      return decide();
    case Stage::kDone:
      return watch_drift();
  }
}

void AutoPlan::watch_drift() {
  const Timeline timeline = reducer_.timeline();
  const bool is_new =
      timeline.iteration > std::exchange(last_noted_, timeline.iteration);
  std::vector<double> slowest = {is_new ? seconds_of(timeline, is_cpu_) : 0};
  profiler_.take_slowest(slowest);
  const double now_s = slowest.front();
  if (now_s == 0) return;
  if (kept_s_.size() < kReferences) {
    kept_s_.push_back(now_s);
    std::ranges::sort(kept_s_);
    return;
  }
  const double kept_s = kept_s_[kReferences / 2];
  const bool has_drifted =
      std::max(now_s, kept_s) > kDrift * std::min(now_s, kept_s);
  num_drifted_ = has_drifted ? num_drifted_ + 1 : 0;
  if (num_drifted_ < kDriftedChecks) return;
  num_drifted_ = 0;
  kept_s_.clear();
  profiler_.clear();
  planned_s_.clear();
  default_s_.clear();
  sample_rate_ = reducer_.set_timeline_sample_rate(1);
  reducer_.set_bucket_plan(default_);
  stage_ = Stage::kLearn;
  num_steps_ = kLearnedSteps;
}

void AutoPlan::note_step() {
  const Timeline timeline = reducer_.timeline();
  if (timeline.iteration <= std::exchange(last_noted_, timeline.iteration)) {
    return;
  }
  if (stage_ == Stage::kTimePlanned) {
    planned_s_.push_back(seconds_of(timeline, is_cpu_));
  } else if (stage_ == Stage::kTimeDefault) {
    default_s_.push_back(seconds_of(timeline, is_cpu_));
  } else if (stage_ == Stage::kProfile) {
    profiler_.add(timeline);
  } else if (timeline.iteration > num_begun_ + 1) {  // the first one is slow
    profiler_.add_overlapped(timeline, reducer_.plan());
  }
}

void AutoPlan::plan() {
  const BackwardModel model = profiler_.model();
  const auto step_with = [&](const BucketPlan& plan) {
    return value_or_throw(predict(plan, model.backward, model.cost));
  };
  const BucketPlan plan =
      value_or_throw(plan_for_cost(model.backward, model.cost, kPlanSlack));
  planned_ = plan.buckets();
  const StepPrediction planned = step_with(plan);
  const StepPrediction by_default = step_with(value_or_throw(
      BucketPlan::create(default_, model.backward.order.size())));
  const auto num_hidden =
      std::ranges::count_if(planned.buckets, [&](const auto& collective) {
        return collective.complete_s <= planned.backward_s;
      });
  predicted_ = absl::StrFormat(
      "predicted: %.2f ms instead of %.2f, %d of %d all-reduces hidden; no "
      "plan is below %.2f",
      1e3 * (planned.end_s() + model.delivery_s),
      1e3 * (by_default.end_s() + model.delivery_s), num_hidden,
      planned_.size(),
      1e3 * (earliest_end_s(model.backward, model.cost) + model.delivery_s));
  const bool gains = planned.end_s() < by_default.end_s();
  if (!gains || planned_ == default_) {
    reducer_.set_bucket_plan(default_);
    report_ = absl::StrCat("kept the ", counted(default_.size(), "bucket"),
                           " of the default\n  (", predicted_, ")");
    stage_ = Stage::kDone;
    return;
  }
  reducer_.set_bucket_plan(planned_);
  stage_ = Stage::kTimePlanned;
  num_steps_ = static_cast<int64_t>(kTimedSteps) + 1;  // the first is slow
}

void AutoPlan::decide() {
  std::vector<double> seconds;
  for (std::vector<double>* const samples : {&planned_s_, &default_s_}) {
    samples->resize(std::max(samples->size(), kTimedSteps));  // missing: 0
    seconds.insert(seconds.end(),
                   samples->end() - static_cast<std::ptrdiff_t>(kTimedSteps),
                   samples->end());
  }
  profiler_.take_slowest(seconds);
  const std::span<const double> of_both = seconds;
  const double planned_s = std::ranges::min(of_both.first(kTimedSteps));
  const double default_s = std::ranges::min(of_both.last(kTimedSteps));
  stage_ = Stage::kDone;
  if (planned_s == 0 || default_s == 0) {
    report_ = absl::StrCat("kept the ", counted(default_.size(), "bucket"),
                           " of the default: too few iterations had a "
                           "timeline\n  (",
                           predicted_, ")");
    return;
  }
  const bool is_faster = planned_s < default_s;
  if (is_faster) reducer_.set_bucket_plan(planned_);
  report_ = absl::StrFormat(
      "%s %s planned for this model and its links instead of %d:\n"
      "  backward with communication takes %.2f ms instead of %.2f (%s)",
      is_faster ? "took" : "did not take", counted(planned_.size(), "bucket"),
      default_.size(), 1e3 * planned_s, 1e3 * default_s, predicted_);
}

}  // namespace brigade
