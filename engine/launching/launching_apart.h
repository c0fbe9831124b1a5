// Launches what belongs to no iteration: in front of a forward, or where a
// sequence changes.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_LAUNCHING_LAUNCHING_APART_H_
#define BRIGADE_ENGINE_LAUNCHING_LAUNCHING_APART_H_

#include <functional>
#include <string_view>

#include "brigade/comm/control/rank_status.h"
#include "brigade/engine/state/engine_state.h"

namespace brigade {

// Calls a collective of all ranks. `doing` begins the error: "broadcasting
// ...". Errors: PeerError; the groups are aborted then.
void call_apart(EngineState& state, std::string_view doing,
                const std::function<void()>& collective);

// What peers have launched in front of a forward and this rank has not. Errors:
// RuntimeError if it does not know what that is; what the collectives throw.
void launch_opening_for_peers(EngineState& state, OpeningTold told);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_LAUNCHING_LAUNCHING_APART_H_
