// Agreement of the ranks on the end of an iteration: the points where they
// exchange statuses, and the steps after a difference or a failure.
//
// A rank that fails sends its status. When all ranks have sent theirs, it
// launches zeros for the rest of its sequence. Earlier, zeros could meet a
// collective of the program, such as batch norm over ranks. On devices it
// launches them at once. If a rank can't launch its zeros, all ranks close the
// group.
//
// On devices the status of an iteration is sent when it ends and awaited some
// iterations later (EngineOptions::max_unconfirmed_iterations). Results have
// been delivered by then, so a failure closes the group.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_H_
#define BRIGADE_ENGINE_AGREEMENT_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"

namespace brigade {

// Collective: connects the ranks, and starts the stall watch. Throws PeerError.
void connect(EngineState& state);

// Compares the policy's sequence, unless ranks have compared it already. Throws
// as end_together().
void agree_on_sequence(EngineState& state, Iteration& iteration);

// Compares where the running iteration begins. Throws as end_together().
void begin_together(EngineState& state);

// Exchanges `own`. Throws on all ranks unless they agree: RuntimeError if they
// differ, PeerError if one has failed or does not answer. The iteration is
// aborted then.
void end_together(EngineState& state, Iteration& iteration,
                  const RankStatus& own);

// Exchanges `own`; if ranks do not agree, waits for what the iteration has
// launched and drops it. Throws PeerError if peers do not answer within
// `patience`.
StatusComparison compare(
    EngineState& state, Iteration& iteration, RankStatus own,
    std::optional<std::chrono::milliseconds> patience = std::nullopt);

// Ends the running iteration after an error and tells the peers, unless they
// know. Does not throw: an error is on its way already.
void abort_iteration(EngineState& state);

// True if results are delivered before peers are known to have ended the
// iteration: on devices, whose collectives don't block the host.
bool may_defer_status(const EngineState& state, const Iteration& iteration);

// Sends `own` and does not wait. Throws as StatusChannel::exchange(); the
// iteration is aborted then.
void end_unconfirmed(EngineState& state, std::shared_ptr<Iteration> iteration,
                     const RankStatus& own);

// Awaits the statuses of all iterations that were delivered before. Throws
// PeerError or RuntimeError if one of them has failed; the group is closed
// then.
void confirm_ends(EngineState& state);

// Awaits them down to the number that may be unconfirmed when an iteration
// begins, and takes the statuses that have come already. Throws as
// confirm_ends().
void confirm_due_ends(EngineState& state);

// Calls a collective of all ranks that belongs to no iteration. `doing`:
// "broadcasting 3 buffers". Throws PeerError; the group is closed then.
void call_between_iterations(EngineState& state, std::string_view doing,
                             const std::function<void()>& collective);

// Keeps the memory of collectives that may never end, and gives the gradients
// other memory.
void abandon_buffers(EngineState& state, Iteration& iteration);

// Keeps what a policy drops until the collectives in flight are complete.
void keep_until_done(std::shared_ptr<void> kept, const Iteration& iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_H_
