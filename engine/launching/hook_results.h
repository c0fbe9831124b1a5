// The results that comm hooks have left of an iteration in futures.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_LAUNCHING_HOOK_RESULTS_H_
#define BRIGADE_ENGINE_LAUNCHING_HOOK_RESULTS_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <ranges>
#include <utility>
#include <vector>

#include "brigade/engine/launching/failure.h"
#include "brigade/engine/state/collective.h"
#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"

namespace brigade {

// What is left to be delivered when the iteration ends. What has no unit is
// waited for by who needs it.
inline auto undelivered(Iteration& iteration) {
  return iteration.launches | std::views::filter([](const Launch& launch) {
           return launch.collective->unit().has_value();
         });
}

// Undefined: nothing travelled, or nothing is to be handed over. REQUIRES: its
// future is complete.
at::Tensor result_of(const Launch& launch);

using Results = std::vector<std::pair<Collective*, at::Tensor>>;

// Waits for all that are undelivered, also after an error, as long as the
// group's timeout each. What a hook did that gives ranks different results is a
// failure too.
std::optional<Failure> collect(EngineState& state, Iteration& iteration,
                               Results& results);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_LAUNCHING_HOOK_RESULTS_H_
