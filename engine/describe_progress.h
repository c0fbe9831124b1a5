// What a stall report says of this rank: how far it is, and what it waits for.

#ifndef BRIGADE_ENGINE_DESCRIBE_PROGRESS_H_
#define BRIGADE_ENGINE_DESCRIBE_PROGRESS_H_

#include <string>

#include "brigade/engine/state/engine_state.h"

namespace brigade {

// REQUIRES: the engine's lock is held.
std::string describe_progress(const EngineState& state);

// While another thread holds it. Thread safety: any.
std::string describe_busy_progress(const EngineState& state);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_DESCRIBE_PROGRESS_H_
