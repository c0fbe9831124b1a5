// One exchange of statuses: this rank tells where it is, and hears where the
// others are.
//
// What follows if they are not in the same place is recovery.h's; when ranks
// compare, rank_agreement.h's.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_EXCHANGE_H_
#define BRIGADE_ENGINE_AGREEMENT_EXCHANGE_H_

#include <chrono>
#include <optional>

#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"
#include "brigade/engine/state/peer_status.h"
#include "brigade/engine/state/status_comparison.h"

namespace brigade {

// Tells peers where this rank is in the iteration, and does not wait. What
// `own` has for a fingerprint goes with that of the sequence. `tells_launches`,
// and errors: as PeerStatus::begin_exchange().
PendingExchange begin_exchange(EngineState& state, const Iteration& iteration,
                               RankStatus own, bool tells_launches = true);

// The same, and waits for what all have told. What some ranks want is given by
// all, and whoever wants nothing tells again, until none does: so that ranks
// which need units at other places need not agree on them.
StatusComparison exchange_and_give(
    EngineState& state, const Iteration& iteration, const RankStatus& own,
    bool tells_launches, std::optional<std::chrono::milliseconds> patience);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_EXCHANGE_H_
