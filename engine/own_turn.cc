#include "brigade/engine/own_turn.h"

#include "brigade/engine/exchange.h"
#include "brigade/engine/recovery.h"

namespace brigade {

StatusComparison take_turn(EngineState& state, OwnTurn& turn) {
  turn.is_told = true;
  return compare_and_recover(
      state, turn.iteration,
      [&](std::optional<std::chrono::milliseconds> limit) {
        return exchange_and_give(state, turn.iteration, turn.own,
                                 /*tells_launches=*/true, limit);
      },
      turn.patience);
}

}  // namespace brigade
