// The end of an iteration that an error has ended.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_ABORT_ITERATION_H_
#define BRIGADE_ENGINE_ABORT_ITERATION_H_

#include "brigade/engine/state/engine_state.h"

namespace brigade {

// Ends the running iteration, and tells peers why unless they know. Does not
// throw: destructors of autograd's call it, and an error is on its way already.
void abort_iteration(EngineState& state);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_ABORT_ITERATION_H_
