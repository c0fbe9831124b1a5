#include "brigade/engine/follow_up.h"

#include <algorithm>

#include "brigade/engine/deferral.h"
#include "brigade/engine/recovery.h"

namespace brigade {

using std::chrono::milliseconds;

namespace {

// Who has ended this one may have ended the next without knowing, the others
// have not.
bool has_anybody_ended(const StatusComparison& comparison, StatusKind own) {
  if (comparison.by_rank.empty()) return own == StatusKind::kEnd;
  return std::ranges::count(comparison.by_rank, StatusKind::kEnd,
                            &RankStatus::kind) > 0;
}

// The next of those that this rank has begun, or what it is in, or nothing.
// Returns whether there may be another behind it.
bool take_part(EngineState& state, OwnTurn* turn,
               std::optional<milliseconds> patience) {
  if (!state.unconfirmed_ends.empty()) {
    const UnconfirmedEnd end = state.take_oldest_end();
    return has_anybody_ended(compare_and_recover(
                                 state, *end.iteration,
                                 [&](std::optional<milliseconds> limit) {
                                   return state.peers.await(end.exchange,
                                                            limit);
                                 },
                                 patience),
                             StatusKind::kEnd);
  }
  if (turn != nullptr && !turn->is_told) {
    const StatusComparison comparison = take_turn(state, *turn);
    if (comparison.status.ok()) drain(state, turn->iteration);
    return has_anybody_ended(comparison, turn->own.kind);
  }
  const auto none = state.make_iteration(state.observations.begun);
  OwnTurn nothing = {.iteration = *none,
                     .own = {.kind = StatusKind::kFollowUp},
                     .patience = patience};
  return has_anybody_ended(take_turn(state, nothing), StatusKind::kFollowUp);
}

}  // namespace

void follow_up(EngineState& state, OwnTurn* turn,
               std::optional<milliseconds> patience) {
  int may_be_behind = max_ends_behind(state);
  while (may_be_behind > 0 && !state.peers.is_group_aborted()) {
    may_be_behind = take_part(state, turn, patience) ? may_be_behind - 1 : 0;
  }
  state.unconfirmed_ends.clear();
  if (!state.peers.is_group_aborted()) state.peers.met();
}

}  // namespace brigade
