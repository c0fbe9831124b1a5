// What follows when ranks have compared where they are and are not in the same
// place, or one of them is lost: this rank launches its deficit, waits for what
// is in flight, or lets go of it. docs/protocol.md, "Statuses".
//
// When ranks compare is status_comparison.h's.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_RECOVERY_H_
#define BRIGADE_ENGINE_RECOVERY_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "brigade/engine/engine_state.h"
#include "brigade/engine/iteration.h"
#include "brigade/engine/peer_status.h"

namespace brigade {

// Tells peers where this rank is in the iteration, and does not wait. What
// `own` has for a fingerprint goes with that of the sequence. `tells_launches`,
// and errors: as PeerStatus::begin_exchange().
PendingExchange begin_exchange(EngineState& state, const Iteration& iteration,
                               RankStatus own, bool tells_launches = true);

// Waits for what all have told, as long as this at most.
using AwaitComparison = std::function<StatusComparison(
    std::optional<std::chrono::milliseconds> patience)>;

// Gets a comparison by `await`, and brings all ranks to the same place if they
// are not. If an iteration is under way, it is over then. Errors: PeerError if
// peers do not answer; the groups are closed then.
StatusComparison compare_by(EngineState& state, Iteration& iteration,
                            const AwaitComparison& await,
                            std::optional<std::chrono::milliseconds> patience);

// Waits for all that the iteration has launched, so that nothing writes into an
// entry's memory behind the user's back. Does not throw for what has failed.
void drain(EngineState& state, Iteration& iteration);

// Collectives that may never end keep their memory; gradients go to another.
void abandon_buffers(EngineState& state, Iteration& iteration);

// This rank can't come to the place where its peers are.
void tell_of_loss(EngineState& state, const Iteration& iteration,
                  const absl::Status& why);

// Calls a collective that belongs to no iteration. Errors: PeerError; the group
// is lost then.
void call_apart(EngineState& state, std::string_view doing,
                const std::function<void()>& collective);

// Collectives in flight that may never end keep what a policy lets go of.
void keep_until_done(std::shared_ptr<void> kept, const Iteration& iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_RECOVERY_H_
