// What becomes of the results of collectives: waited for, and delivered unless
// something has failed (engine/launching/failure.h).
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_DELIVERY_H_
#define BRIGADE_ENGINE_DELIVERY_H_

#include <memory>

#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"

namespace brigade {

// Waits for the results of an iteration that all ranks have launched to its
// end, also after an error: nothing may write into an entry's memory behind the
// user's back. Delivers them, unless the iteration is a shadow, and tells the
// policy of the end.
//
// What a built-in hook's future holds is right on all ranks or on none, and is
// delivered as it comes. A user's hook may fail on one rank alone, so that
// ranks tell each other before anybody delivers.
//
// Errors: what a collective or a hook failed with, and of a user's hook on all
// ranks alike.
void deliver_all(EngineState& state, Iteration& iteration);

// The same where peers may not have ended it yet: tells them `end` and does not
// wait for theirs (confirm_ends() does). A user's hook's results come first; if
// they fail, peers are told of that instead, and waited for. Errors: as
// deliver_all(), but of a user's hook on this rank only, on the others in
// confirm_ends(). REQUIRES: may_defer_status().
void deliver_unconfirmed(EngineState& state,
                         const std::shared_ptr<Iteration>& iteration,
                         const RankStatus& end);

// Waits for the first entry and delivers it, before the end of the iteration.
// REQUIRES: it has been launched, and has no unit. Errors: as deliver_all().
void deliver_first(EngineState& state, const Iteration& iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_DELIVERY_H_
