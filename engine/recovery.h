// Where the ranks of an iteration meet, and what becomes of it when one of them
// has failed or is somewhere else. docs/protocol.md, "Statuses".
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_RECOVERY_H_
#define BRIGADE_ENGINE_RECOVERY_H_

#include <chrono>
#include <cstddef>
#include <optional>

#include "brigade/engine/engine_state.h"
#include "brigade/engine/iteration.h"
#include "brigade/engine/peer_status.h"

namespace brigade {

// Ranks connect to each other. Collective.
void connect(EngineState& state);

// Compares the policy's sequence, if it is another one than was compared last.
// Errors: as end_together().
void agree_on_sequence(EngineState& state, Iteration& iteration);

// Ranks begin the running iteration together. Errors: as compare(),
// RuntimeError if they differ.
void begin_together(EngineState& state);

// Throws on all ranks alike unless all are in the same place. The iteration is
// aborted then. Returns whether all ranks propose the same.
bool end_together(EngineState& state, Iteration& iteration,
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
void ask_together(EngineState& state, const RankStatus& own);

// True if `iteration`, of which all is launched, may be delivered before peers
// are known to have ended it.
bool may_defer_status_check(const EngineState& state,
                            const Iteration& iteration);

// Tells peers that all is launched, and does not wait for them. REQUIRES: fewer
// unconfirmed ends than may be.
//
// Errors: as begin_exchange(); the iteration is aborted then.
void end_unconfirmed(EngineState& state, std::shared_ptr<Iteration> iteration,
                     const RankStatus& own);

// What peers said at the ends of iterations that were delivered before, oldest
// first, until `num_left` are left. Errors, on all ranks alike but for those
// that failed, which know already: as compare(), PeerError if ranks have failed
// in one of them; none is left then.
void confirm_ends(EngineState& state, size_t num_left = 0);

// How many ends may be left unconfirmed when the next iteration is prepared.
size_t num_ends_left_open(const EngineState& state);

// Ends the running iteration, and tells peers why. Does not throw: destructors
// of autograd's call it, and an error is on its way already.
void abort_iteration(EngineState& state);

// Closes the group's connections. Peers that wait for this rank's next status
// get these words.
void abort_group(EngineState& state, const RankStatus& last_words);

// Calls a collective that belongs to no iteration. Errors: PeerError; the group
// is lost then.
void call_apart(EngineState& state, std::string_view doing,
                const std::function<void()>& collective);

// Collectives in flight that may never end keep what `policy` lets go of.
void keep_until_done(std::shared_ptr<void> kept, const Iteration& iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_RECOVERY_H_
