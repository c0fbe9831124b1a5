// Launches second collectives, which comm hooks have chained behind their first
// ones (comm_hooks/then_collective.h).
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_LAUNCHING_LAUNCHING_CHAINED_H_
#define BRIGADE_ENGINE_LAUNCHING_LAUNCHING_CHAINED_H_

#include <optional>

#include "brigade/engine/launching/failure.h"
#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"

namespace brigade {

// In the order of the sequence on every rank, on the calling thread.
std::optional<Failure> launch_chained(EngineState& state, Iteration& iteration);

// Those that a hook launched by itself, in a continuation of its future, are a
// failure: continuations run in another order on each rank. One unit has but
// one order.
std::optional<Failure> find_unordered_collectives(const EngineState& state,
                                                  const Iteration& iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_LAUNCHING_LAUNCHING_CHAINED_H_
