// Iterations that were delivered here before all ranks were known to have ended
// them: what peers have said of them is looked at later. docs/protocol.md,
// "Deferred".
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_UNCONFIRMED_ENDS_H_
#define BRIGADE_ENGINE_AGREEMENT_UNCONFIRMED_ENDS_H_

#include <memory>

#include "brigade/engine/agreement/own_exchange.h"
#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"
#include "brigade/engine/state/peer_status.h"

namespace brigade {

// Tells peers that all is launched, and does not wait for them. REQUIRES: fewer
// unconfirmed ends than may be.
//
// Errors: as begin_exchange(); the iteration is aborted then.
void end_unconfirmed(EngineState& state, std::shared_ptr<Iteration> iteration,
                     const RankStatus& own);

// What peers said at the ends of iterations that were delivered before, oldest
// first; none is left then. Errors, on all ranks alike but for those that
// failed, which know already: as compare(), PeerError if ranks have failed in
// one of them.
void confirm_ends(EngineState& state);

// The same before another iteration is prepared, of what peers have said. Waits
// for them only while as many ends are open as may be, or while the policy must
// know all that they teach.
void confirm_known_ends(EngineState& state);

// As confirm_ends(), where a rank that hears of a failure makes its own
// exchange if peers may have begun theirs.
void confirm_ends_before(EngineState& state, OwnExchange& exchange);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_UNCONFIRMED_ENDS_H_
