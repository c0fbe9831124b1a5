// Sweep over bucket sizes: times a model's training steps with several sizes
// and with a plan made for the measured links, and recommends one. Results are
// a struct, a table and JSON.
//
// Example, one process per rank:
//
//   const SweepSummary summary = sweep(
//       net->parameters(),
//       [&] { return torch::mse_loss(net->forward(inputs), targets); }, group);
//   if (group->getRank() == 0) std::cout << to_text("Net", summary);
//
// Thread safety: none.

#ifndef BRIGADE_BUCKET_SWEEP_SWEEP_H_
#define BRIGADE_BUCKET_SWEEP_SWEEP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/reducer/backward_model.h"
#include "brigade/reducer/reducer_options.h"

namespace brigade {

struct Quartiles {
  double p25 = 0;
  double median = 0;
  double p75 = 0;
};
Quartiles quartiles(const std::vector<double>& samples);

// Interpolates linearly. REQUIRES: samples not empty; 0 <= q <= 1.
double quantile(std::vector<double> samples, double q);

struct SweepSamples;

struct SweepOptions {
  // Bucket caps in MiB; "one" bucket for all parameters; "each": one bucket per
  // parameter.
  std::vector<std::string> sizes = {"each", "0.25", "1",   "4",
                                    "10",   "25",   "100", "one"};

  // Turns of each size; three times as many if the fastest arm saves more than
  // 1 % of a step and chance may be the reason.
  int64_t rounds = 8;
  int64_t steps = 3;  // timed per turn, after one warm-up step

  // Bucket caps and bucket plan are ignored. Names are those of the parameters
  // that require a gradient.
  ReducerOptions reducer = {};

  // Called after each round, on all ranks, with equal samples. An exception
  // ends the sweep.
  std::function<void(const SweepSamples&)> after_round = {};

  // Samples of an interrupted sweep, which this one continues; the same on all
  // ranks. null: a new sweep.
  std::shared_ptr<const SweepSamples> resumed = {};
};

// Results for one bucket plan, which several sizes may have in common.
struct ArmSummary {
  std::string label = {};                // names all of its sizes
  std::vector<int64_t> caps_bytes = {};  // of its first size
  std::vector<int64_t> bucket_bytes = {};
  Quartiles step_ms = {};

  // Time that communication adds to a step, in the same round. Negative values
  // are noise.
  Quartiles added_ms = {};

  // step_ms.median according to the model in planning/planners.h.
  double predicted_ms = 0;

  // Time of the buckets' all-reduces, one after another, without any
  // computation.
  double alone_ms = 0;

  // Returns the fraction of alone_ms that backward hides: 0 if packing, latency
  // and waiting for a slower rank cost more than that. Returns nullopt if
  // alone_ms is below 0.1 ms or below the interquartile range of step_ms.
  std::optional<double> overlap() const;
};

// The fastest decided arm other than the default, or the fastest one if none is
// decided, compared with the default round by round.
struct Recommendation {
  size_t arm = 0;           // index into SweepSummary::arms
  Quartiles saved_ms = {};  // per step, compared with the default
  double saved_share = 0;   // median saving / median default step
  int64_t rounds_faster = 0;

  // True if chance is an unlikely explanation: a sign test over the rounds,
  // corrected for the number of arms, has p <= 0.04 after
  // SweepOptions::rounds, or p <= 0.01 after three times as many.
  bool decided = false;
};

struct SweepSummary {
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  int64_t rounds = 0;
  int64_t steps = 0;                  // per round
  Quartiles local_ms = {};            // a step without communication
  std::vector<ArmSummary> arms = {};  // the first is the default
  double bound_ms = 0;        // no plan has a faster step, by the same model
  bool is_model_off = false;  // a measured median is below the bound
  std::optional<Recommendation> best = {};  // none: all sizes equal the default
  int64_t least_rounds = 0;                 // no arm is decided in fewer
};

// Collective. `loss()` runs the forward on this rank's data and returns a
// one-element tensor. It is called and timed once per step. Parameters keep
// their values and end without gradients; frozen ones are skipped. Buffers are
// not broadcast.
//
// Errors: ValueError if rounds or steps are < 1, a size is invalid, the group
// has 1 rank, no parameter requires a gradient, the loss has several elements,
// or resumed samples have another number of ranks, other parameters, sizes,
// rounds or steps; the errors of Reducer.
SweepSummary sweep(const std::vector<at::Tensor>& parameters,
                   const std::function<at::Tensor()>& loss,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const SweepOptions& options = {});

// Formats two lines about the model, a table of 80 columns with a row per plan,
// and a recommendation.
std::string to_text(const std::string& name, const SweepSummary& summary);

// Formats the same, and the samples, as one JSON object: docs/guides/
// bucket_sizes.md lists its keys.
std::string to_json(const std::string& name, const SweepSamples& samples);

// Reads to_json()'s text. Errors: InvalidArgument if it is no such text.
absl::StatusOr<SweepSamples> samples_from_json(std::string_view text);

// ---- The steps of sweep(), which tests call.

struct BucketArm {
  std::string label;
  std::vector<int64_t> caps_bytes;  // ReducerOptions::bucket_cap_bytes
};

BucketArm default_arm();

// Parses "0.25", a bucket cap in MiB; "one", one bucket for all parameters; or
// "each", one bucket per parameter. Throws ValueError for any other text.
BucketArm arm_of(std::string_view size);

// Times of one bucket plan on the slowest rank.
struct PlanSamples {
  std::vector<BucketArm> arms = {};               // all that result in the plan
  std::vector<std::vector<size_t>> buckets = {};  // empty: no communication
  std::vector<std::vector<double>> rounds_ms = {};  // by round, then by step
  std::vector<double> alone_ms = {};  // the buckets' all-reduces, by round

  // By bucket, of the last step.
  std::vector<StepPrediction::Collective> timeline = {};
};

struct SweepSamples {
  int64_t num_ranks = 0;
  std::vector<std::string> names = {};  // of parameters; may be empty
  int64_t rounds = 0;                   // as in SweepOptions
  int64_t steps = 0;
  BackwardModel model = {};
  double forward_ms = 0;
  std::vector<std::vector<double>> local_ms = {};  // no communication, by round
  std::vector<PlanSamples> plans = {};             // the default's first
};

// The plan of plan_for_cost(), as the sizes of its buckets. Exact for
// parameters of one kind.
BucketArm planned_arm(const BackwardModel& model);

// Collects the samples of sweep(); same contract. All plans, and the same steps
// without communication, take turns in one run, in alternating order. A slow
// phase of the machine then affects all of them.
SweepSamples measure(const std::vector<at::Tensor>& parameters,
                     const std::function<at::Tensor()>& loss,
                     const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                     const SweepOptions& options);
SweepSummary summarize(const SweepSamples& samples);
StepPrediction prediction_of(const PlanSamples& plan,
                             const BackwardModel& model);

// Rounds that measure() takes in all, given the samples so far.
int64_t rounds_to_take(const SweepSamples& samples);

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_SWEEP_H_
