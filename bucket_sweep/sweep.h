// The bucket size that suits a model: its training steps timed under several,
// and their medians, paired differences and a recommendation, as a table and as
// JSON.
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
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/reducer/reducer_options.h"

namespace brigade {

struct Quartiles {
  double p25 = 0;
  double median = 0;
  double p75 = 0;
};
Quartiles quartiles(const std::vector<double>& samples);

// Between two samples, linearly. REQUIRES: samples not empty; 0 <= q <= 1.
double quantile(std::vector<double> samples, double q);

struct SweepOptions {
  // MiB; "one" bucket for all parameters; one for "each".
  std::vector<std::string> sizes = {"each", "0.25", "1",   "4",
                                    "10",   "25",   "100", "one"};
  int64_t rounds = 8;  // visits to each size
  int64_t steps = 3;   // timed per visit, after one that is not

  // How the model is trained, except for sizes of buckets and the plan.
  ReducerOptions reducer = {};
};

// Sizes that give the same buckets.
struct ArmSummary {
  std::string label = {};                // of all these sizes
  std::vector<int64_t> caps_bytes = {};  // of the first of them
  std::vector<int64_t> bucket_bytes = {};
  Quartiles step_ms = {};

  // The step less one of the same round without a reducer.
  Quartiles exposed_ms = {};

  // All-reduces of buffers as large as the buckets, one after the other, while
  // nothing else is done.
  double alone_ms = 0;

  // The share of alone_ms that backward hides. Negative when packing, latency
  // and waiting for the slower rank cost more than backward hides.
  double overlap() const { return 1 - exposed_ms.median / alone_ms; }
};

// The fastest arm beside the default, compared with it round by round.
struct Recommendation {
  size_t arm = 0;           // index into SweepSummary::arms
  Quartiles saved_ms = {};  // per step, of the default's
  double saved_share = 0;   // median, of the default's median
  int64_t rounds_faster = 0;
  int64_t rounds = 0;

  // Chance alone is an unlikely explanation: with a fair coin per round, and so
  // many arms to choose from, below 1 in 20.
  bool decided = false;
};

struct SweepSummary {
  int64_t num_parameters = 0;
  int64_t gradient_bytes = 0;
  Quartiles local_ms = {};                  // a step without a reducer
  std::vector<ArmSummary> arms = {};        // the first is the default
  std::optional<Recommendation> best = {};  // none: all arms are the default's
};

// Collective. `loss()` runs the forward on this rank's data and returns the
// loss, a tensor of one element; it is called once per step and all of it is
// timed. Parameters keep their values and end without gradients; those that
// require no gradient are skipped. Buffers are not broadcast.
//
// Errors: ValueError if rounds or steps are < 1, a size is none, or there is no
// parameter; what a Reducer throws.
SweepSummary sweep(const std::vector<at::Tensor>& parameters,
                   const std::function<at::Tensor()>& loss,
                   const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const SweepOptions& options = {});

// A line about the model, a row per plan, and a recommendation.
std::string to_text(const std::string& name, const SweepSummary& summary);

// The same as one JSON object.
std::string to_json(const std::string& name, const SweepSummary& summary);

struct SweepSamples;  // of measurement.h
SweepSummary summarize(const SweepSamples& samples);

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_SWEEP_H_
