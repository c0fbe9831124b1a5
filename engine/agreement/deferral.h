// How far results are delivered before all ranks are known to have ended the
// iteration. docs/protocol.md, "Deferred".
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_DEFERRAL_H_
#define BRIGADE_ENGINE_AGREEMENT_DEFERRAL_H_

#include <cstddef>

#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"

namespace brigade {

// True if `iteration`, of which all is launched, may be delivered before peers
// are known to have ended it.
bool may_defer_status_check(const EngineState& state,
                            const Iteration& iteration);

// So many ends may be unconfirmed where the next iteration is prepared.
size_t max_open_ends(const EngineState& state);

// How many ends a rank may have told of behind one of which it has not heard.
int max_ends_behind(const EngineState& state);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_DEFERRAL_H_
