// Ranks connect to each other, to tell where they are.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_CONNECT_H_
#define BRIGADE_ENGINE_AGREEMENT_CONNECT_H_

#include "brigade/engine/state/engine_state.h"

namespace brigade {

// Collective. From here on stalls are watched, too. Errors: as
// PeerStatus::connect().
void connect(EngineState& state);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_CONNECT_H_
