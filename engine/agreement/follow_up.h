// Exchanges behind one that was refuted. With ends that were left unconfirmed
// (unconfirmed_ends.h) ranks may have begun different numbers of them.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_FOLLOW_UP_H_
#define BRIGADE_ENGINE_AGREEMENT_FOLLOW_UP_H_

#include <chrono>
#include <optional>

#include "brigade/engine/agreement/own_exchange.h"
#include "brigade/engine/state/engine_state.h"

namespace brigade {

// Ranks that hear that an exchange is refuted have begun different numbers of
// others behind it. All take part in each that one of them has begun, and in
// one more, which tells them that it is the last, and so come to the same
// place: what they launched in each is brought in step behind it, since a rank
// may begin the next only when its device has seen that. `exchange`: what this
// rank is in, if anything.
void follow_up(EngineState& state, OwnExchange* exchange,
               std::optional<std::chrono::milliseconds> patience);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_FOLLOW_UP_H_
