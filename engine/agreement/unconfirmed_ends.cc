#include "brigade/engine/agreement/unconfirmed_ends.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/engine/agreement/deferral.h"
#include "brigade/engine/agreement/exchange.h"
#include "brigade/engine/agreement/follow_up.h"
#include "brigade/engine/agreement/recovery.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

void confirm_oldest_end(EngineState& state, OwnExchange* exchange) {
  const UnconfirmedEnd end = state.take_oldest_end();
  const size_t num_behind = state.unconfirmed_ends.size();
  const auto patience = exchange != nullptr ? exchange->patience : std::nullopt;
  try {
    const StatusComparison comparison = compare_and_recover(
        state, *end.iteration,
        [&](std::optional<milliseconds> limit) {
          StatusComparison found = state.peers.await(end.exchange, limit);
          if (!found.status.ok() && state.peers.has_gone_on()) {
            found.deficit = absl::FailedPreconditionError(
                "A rank that had delivered has launched other collectives on "
                "the group since, so that its connections are closed.");
            tell_of_abort(state, *end.iteration, found.deficit.status());
          }
          return found;
        },
        patience);
    if (comparison.status.ok()) {
      return state.policy.on_end_confirmed(comparison.alike);
    }
    follow_up(state, exchange, patience);
    throw_if_apart(
        comparison,
        absl::StrCat(
            state.options.name, ": iteration ", end.iteration->number,
            num_behind == 0 ? ""
                            : absl::StrCat(", and ", num_behind, " behind it"),
            ", whose results this rank has delivered without knowing it"));
  } catch (...) {
    state.unconfirmed_ends.clear();
    state.policy.on_end_refuted();
    throw;
  }
}

}  // namespace

void end_unconfirmed(EngineState& state, std::shared_ptr<Iteration> iteration,
                     const RankStatus& own) {
  try {
    PendingExchange exchange = begin_exchange(state, *iteration, own);
    state.unconfirmed_ends.push_back(
        {.iteration = std::move(iteration), .exchange = std::move(exchange)});
  } catch (...) {
    abandon_buffers(state, *iteration);
    ++state.observations.aborted;
    state.policy.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
    throw;
  }
  if (is_between(state.phase)) state.phase = Phase::kAtSyncPoint;
}

void confirm_ends(EngineState& state) {
  while (!state.unconfirmed_ends.empty()) {
    confirm_oldest_end(state, /*exchange=*/nullptr);
  }
}

void confirm_known_ends(EngineState& state) {
  const size_t max_open = max_open_ends(state);
  while (!state.unconfirmed_ends.empty() &&
         (state.unconfirmed_ends.size() > max_open ||
          state.peers.is_over(state.unconfirmed_ends.front().exchange))) {
    confirm_oldest_end(state, /*exchange=*/nullptr);
  }
}

void confirm_ends_before(EngineState& state, OwnExchange& exchange) {
  while (!state.unconfirmed_ends.empty()) confirm_oldest_end(state, &exchange);
}

}  // namespace brigade
