// An exchange that this rank takes part in with what it is in itself, once.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_AGREEMENT_OWN_EXCHANGE_H_
#define BRIGADE_ENGINE_AGREEMENT_OWN_EXCHANGE_H_

#include <chrono>
#include <optional>

#include "brigade/comm/control/rank_status.h"
#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"
#include "brigade/engine/state/status_comparison.h"

namespace brigade {

// An iteration that this rank is in when it looks at ends of earlier ones.
struct OwnExchange {
  Iteration& iteration;
  RankStatus own;
  std::optional<std::chrono::milliseconds> patience;
  bool is_told = false;
};

// Tells peers of it and compares. Errors: as compare_and_recover().
StatusComparison tell_and_compare(EngineState& state, OwnExchange& exchange);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_AGREEMENT_OWN_EXCHANGE_H_
