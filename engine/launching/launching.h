// Launches the entries of an iteration's sequence, in order.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_LAUNCHING_LAUNCHING_H_
#define BRIGADE_ENGINE_LAUNCHING_LAUNCHING_H_

#include <cstddef>

#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"

namespace brigade {

// One of those that `entry` waits for is there: packs it if that was the last.
// Returns whether it was. Errors: what packing throws.
bool mark_and_pack(EngineState& state, size_t entry);

// Launches what is ready of the running iteration; substitutes if it is a
// shadow. Errors: what a collective throws, with its name in front.
void launch_ready(EngineState& state);

// Launches zeros for all of an aborted iteration that has not been launched,
// and does not wait. Throws what a collective throws.
void launch_rest(EngineState& state, Iteration& iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_LAUNCHING_LAUNCHING_H_
