#include "brigade/engine/agreement/follow_up.h"

#include <algorithm>

#include "brigade/engine/agreement/deferral.h"
#include "brigade/engine/agreement/recovery.h"

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
bool take_part(EngineState& state, OwnExchange* exchange,
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
  if (exchange != nullptr && !exchange->is_told) {
    const StatusComparison comparison = tell_and_compare(state, *exchange);
    if (comparison.status.ok()) drain(state, exchange->iteration);
    return has_anybody_ended(comparison, exchange->own.kind);
  }
  const auto none = state.make_iteration(state.observations.begun);
  OwnExchange nothing = {.iteration = *none,
                         .own = {.kind = StatusKind::kFollowUp},
                         .patience = patience};
  return has_anybody_ended(tell_and_compare(state, nothing),
                           StatusKind::kFollowUp);
}

}  // namespace

void follow_up(EngineState& state, OwnExchange* exchange,
               std::optional<milliseconds> patience) {
  int may_be_behind = max_ends_behind(state);
  while (may_be_behind > 0 && !state.peers.is_group_aborted()) {
    may_be_behind =
        take_part(state, exchange, patience) ? may_be_behind - 1 : 0;
  }
  state.unconfirmed_ends.clear();
  if (!state.peers.is_group_aborted()) state.peers.restart_counts();
}

}  // namespace brigade
