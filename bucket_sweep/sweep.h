// Which bucket size suits a model: its training steps timed under several.
//
// Example, one process per rank:
//
//   const SweepSummary summary = sweep(
//       [] { torch::manual_seed(0); return Net(); },
//       [&](Net& net) { return torch::mse_loss(net(inputs), targets); },
//       usual_arms(), group);
//   if (group->getRank() == 0) std::cout << to_text("Net", summary);
//
// measurement.h takes the times, summary.h says what they mean.
//
// Thread safety: none.

#ifndef BRIGADE_BUCKET_SWEEP_SWEEP_H_
#define BRIGADE_BUCKET_SWEEP_SWEEP_H_

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "brigade/bucket_sweep/measurement.h"
#include "brigade/bucket_sweep/summary.h"
#include "brigade/bucket_sweep/workload.h"

namespace brigade {

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
  using Module = std::decay_t<decltype(make_module())>;
  ModuleWorkload<Module, std::decay_t<Loss>> workload(
      make_module(), std::forward<Loss>(loss), group);
  return summarize(measure(workload, arms, group, options, after_visit));
}

}  // namespace brigade

#endif  // BRIGADE_BUCKET_SWEEP_SWEEP_H_
