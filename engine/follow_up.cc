#include "brigade/engine/follow_up.h"

#include "brigade/engine/exchange.h"
#include "brigade/engine/recovery.h"

namespace brigade {

using std::chrono::milliseconds;

StatusComparison take_turn(EngineState& state, OwnTurn& turn) {
  turn.is_told = true;
  return compare_by(
      state, turn.iteration,
      [&](std::optional<milliseconds> limit) {
        return exchange_and_give(state, turn.iteration, turn.own,
                                 /*tells_launches=*/true, limit);
      },
      turn.patience);
}

void follow_up(EngineState& state, OwnTurn* turn,
               std::optional<milliseconds> patience) {
  for (int i = 1; i < state.options.max_unconfirmed_iterations &&
                  !state.peers.has_lost_group();
       ++i) {
    if (!state.unconfirmed_ends.empty()) {
      const UnconfirmedEnd end = state.take_oldest_end();
      compare_by(
          state, *end.iteration,
          [&](std::optional<milliseconds> limit) {
            return state.peers.await(end.exchange, limit);
          },
          patience);
    } else if (turn != nullptr && !turn->is_told) {
      if (take_turn(state, *turn).status.ok()) drain(state, turn->iteration);
    } else {
      const auto none = state.make_iteration(state.observations.begun);
      OwnTurn nothing = {.iteration = *none,
                         .own = {.kind = StatusKind::kIdle},
                         .patience = patience};
      take_turn(state, nothing);
    }
  }
  state.unconfirmed_ends.clear();
  if (!state.peers.has_lost_group()) state.peers.met();
}

}  // namespace brigade
