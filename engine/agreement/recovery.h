// What follows when ranks have compared where they are and are not in the same
// place, or one of them is lost: this rank launches its deficit, waits for what
// is in flight, or lets go of it. docs/protocol.md, "Statuses".
//
// How they tell each other is exchange.h's.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_RECOVERY_H_
#define BRIGADE_ENGINE_AGREEMENT_RECOVERY_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"
#include "brigade/engine/state/status_comparison.h"

namespace brigade {

// Waits for what all have told, as long as this at most.
using AwaitComparison = std::function<StatusComparison(
    std::optional<std::chrono::milliseconds> patience)>;

// Gets a comparison by `await`, and brings all ranks to the same place if they
// are not. If an iteration is under way, it is over then. Errors: PeerError if
// peers do not answer; the groups are closed then.
StatusComparison compare_and_recover(
    EngineState& state, Iteration& iteration, const AwaitComparison& await,
    std::optional<std::chrono::milliseconds> patience);

// Of all groups the connections, and what is in flight on them.
void close_and_abandon(EngineState& state, Iteration& iteration);

// Waits for all that the iteration has launched, so that nothing writes into an
// entry's memory behind the user's back. Does not throw for what has failed.
void drain(EngineState& state, Iteration& iteration);

// Collectives that may never end keep their memory; gradients go to another.
void abandon_buffers(EngineState& state, Iteration& iteration);

// This rank can't come to the place where its peers are.
void tell_of_abort(EngineState& state, const Iteration& iteration,
                   const absl::Status& why);

// Collectives in flight that may never end keep what a policy lets go of.
void keep_until_done(std::shared_ptr<void> kept, const Iteration& iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_RECOVERY_H_
