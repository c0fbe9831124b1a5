// Where the ranks of an iteration meet: where it begins, where it ends, where
// one asks the others, and where one has failed. docs/protocol.md, "Statuses".
//
// What follows if they are not in the same place is recovery.h's.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_RANK_AGREEMENT_H_
#define BRIGADE_ENGINE_AGREEMENT_RANK_AGREEMENT_H_

#include <chrono>
#include <optional>

#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"
#include "brigade/engine/state/status_comparison.h"

namespace brigade {

// Compares the policy's sequence, if it is another one than was compared last.
// Errors: as end_together().
void agree_on_sequence(EngineState& state, Iteration& iteration);

// Ranks begin the running iteration together. Errors: as compare(),
// RuntimeError if they differ.
void begin_together(EngineState& state);

// Throws on all ranks alike unless all are in the same place. The iteration is
// aborted then. Returns what ranks have told alike besides.
ToldAlike end_together(EngineState& state, Iteration& iteration,
                       const RankStatus& own);

// Tells peers where this rank is, and brings all to the same place if they are
// not. Errors: PeerError if peers do not answer.
StatusComparison compare(
    EngineState& state, Iteration& iteration, RankStatus own,
    std::optional<std::chrono::milliseconds> patience = std::nullopt);

// All ranks are about to do what `own` says, in the middle of the running
// iteration; what they have launched of it need not be the same. Errors:
// RuntimeError on all ranks if they differ, PeerError if one has failed or does
// not answer; the rest of the sequence has been launched then.
// REQUIRES: EngineOptions::launches_rest_when_failing.
ToldAlike ask_together(EngineState& state, const RankStatus& own);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_RANK_AGREEMENT_H_
