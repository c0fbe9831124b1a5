// The bucket size that suits a model: its training steps timed under several,
// and their medians, paired differences and a recommendation, as a table and as
// JSON.
//
// Example, one process per rank:
//
//   const SweepSummary summary = sweep(
//       [] { torch::manual_seed(0); return Net(); },
//       [&](Net& net) { return torch::mse_loss(net(inputs), targets); },
//       usual_arms(), group);
//   if (group->getRank() == 0) std::cout << to_text("Net", summary);
//
// Thread safety: none.

#ifndef BRIGADE_BUCKET_SWEEP_SWEEP_H_
#define BRIGADE_BUCKET_SWEEP_SWEEP_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/bucket_sweep/measurement.h"
#include "brigade/bucket_sweep/quantiles.h"

namespace brigade {

struct ArmSummary {
  std::string label = {};                // of all arms that give these buckets
  std::vector<int64_t> caps_bytes = {};  // of the first of them
  std::vector<int64_t> bucket_bytes = {};
  Quartiles step_ms = {};

  // The step less one of the same round without a reducer.
  Quartiles exposed_ms = {};

  // All-reduces of buffers as large as the buckets, one after the other, while
  // nothing else is done.
  double alone_ms = 0;

  bool sums_verified = false;  // all ranks had the right averages

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

SweepSummary summarize(const SweepSamples& samples);

// The probability that a fair coin shows at least `heads` heads.
double chance_of(int64_t heads, int64_t throws);

// A line about the workload, a row per plan, and recommendation(). `name`
// and `backward` ("computed", "102 ms asleep") stand in the first line.
std::string to_text(const std::string& name, const SweepSummary& summary,
                    const std::string& backward = "computed");

// One sentence: the setting, and the time that it saves.
std::string recommendation(const SweepSummary& summary);

// The same as one JSON object.
std::string to_json(const std::string& name, const SweepSummary& summary,
                    const std::string& backward = "computed");

// Collective. `make_module()` gives the module, equal on all ranks: a holder, a
// std::shared_ptr of a module, or a torch::jit::Module. `loss(module)` runs its
// forward on this rank's data and returns the loss, a tensor of one element; it
// is called once per step, and all it does is timed. Buffers are not sent:
// that takes equally long with any buckets.
//
// Errors: as measure().
template <typename MakeModule, typename Loss>
SweepSummary sweep(
    MakeModule&& make_module, Loss&& loss, const std::vector<BucketArm>& arms,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const SweepOptions& options = {},
    const std::function<void(const std::string&)>& after_visit = nullptr) {
  auto module = make_module();
  std::vector<at::Tensor> parameters;
  const auto add_all = [&](const auto& all) {
    for (const at::Tensor& parameter : all) parameters.push_back(parameter);
  };
  if constexpr (requires { module->parameters(); }) {
    add_all(module->parameters());
  } else {
    add_all(module.parameters());
  }
  ModuleWorkload workload(
      parameters, [&] { return loss(module); }, group);
  return summarize(measure(workload, arms, group, options, after_visit));
}

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_SWEEP_H_
