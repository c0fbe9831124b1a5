// Buckets planned for a model and its links while it trains.
//
//   iterations 1, 2   default buckets
//   3, 4              one bucket, so that backward runs alone and is recorded
//   end of the 4th    all-reduces are timed, and buckets are planned
//   5 to 7, 8 to 10   planned buckets, then default ones, are timed
//   from the 11th on  the faster of both
//   each 1,000th      steps that take 1.5 times as long as before, or less than
//                     1/1.5, twice in a row: all this happens again
//
// It stops, on all ranks, if the program sets a bucket plan or a comm hook.
//
// On devices a single iteration with one bucket per parameter is recorded.
// Times are those of timelines: without them, because the sample rate is 0 or
// iterations failed, the default is kept.
//
// Thread safety: none.

#ifndef BRIGADE_REDUCER_AUTO_PLAN_H_
#define BRIGADE_REDUCER_AUTO_PLAN_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/reducer/backward_model.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

class AutoPlan {
 public:
  // Makes a plan that `reducer` owns and calls at the ends of its iterations.
  // They may then also throw DistBackendError if a collective of the plan
  // fails, and can_continue() is false. The other arguments are those of
  // `reducer`; `watched_steps`: iterations between two looks for drift. Throws
  // ValueError if the hook steps an optimizer, which restricts buckets.
  static std::shared_ptr<const AutoPlan> attach(
      Reducer& reducer, std::vector<at::Tensor> parameters,
      std::vector<bool> sparse,
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      int64_t watched_steps = 1000);

  // Use attach().
  AutoPlan(Reducer& reducer, std::vector<at::Tensor> parameters,
           std::vector<bool> sparse,
           const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           int64_t watched_steps);

  bool is_done() const { return stage_ == Stage::kDone; }

  // Two lines once it is done: the numbers of buckets, and the measured and
  // predicted times. Equal on all ranks; rank 0 prints them to stderr.
  const std::string& report() const { return report_; }

 private:
  enum class Stage { kLearn, kProfile, kTimePlanned, kTimeDefault, kDone };
  using Buckets = std::vector<std::vector<size_t>>;

  static constexpr int64_t kLearnedSteps = 2;

  void after_iteration();
  void stop();
  void note_step();
  void watch_drift();
  void next_stage();
  void plan();
  void decide();

  Reducer& reducer_;
  BackwardProfiler profiler_;
  const bool is_cpu_;
  const bool is_rank_0_;
  const int64_t watched_steps_;
  const std::shared_ptr<const c10d::CommHookInterface> hook_;
  Buckets buckets_;           // after the last stage
  int64_t num_rebuilds_ = 0;  // then
  bool is_stopped_ = false;
  Stage stage_ = Stage::kLearn;
  int64_t num_steps_ = kLearnedSteps;  // of the stage
  int64_t num_begun_ = 0;              // iterations before the stage
  int64_t last_noted_ = 0;             // iteration of the last timeline
  Buckets default_;
  Buckets planned_;
  std::string predicted_;
  std::vector<double> planned_s_;  // by timed step
  std::vector<double> default_s_;
  std::string report_;
  std::vector<double> kept_s_;  // of the first steps watched, ascending
  int num_drifted_ = 0;
  std::optional<int64_t> sample_rate_;  // before the steps were watched
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_AUTO_PLAN_H_
