#include "brigade/engine/unconfirmed_ends.h"

#include <algorithm>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/engine/exchange.h"
#include "brigade/engine/recovery.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

void confirm_oldest_end(EngineState& state, OwnTurn* turn) {
  const UnconfirmedEnd end = state.take_oldest_end();
  const size_t num_behind = state.unconfirmed_ends.size();
  const auto patience = turn != nullptr ? turn->patience : std::nullopt;
  try {
    const StatusComparison comparison = compare_by(
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
      return state.policy.on_end_confirmed(comparison.has_agreed_proposal);
    }
    follow_up(state, turn, patience);
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

// On the CPU results keep the host waiting for peers anyway.
bool runs_ahead_of_peers(std::span<Collective* const> sequence) {
  return std::ranges::none_of(sequence, [](const Collective* collective) {
    return collective->device().is_cpu();
  });
}

// When the next iteration is prepared. What an iteration teaches counts before
// that. One that could not be delivered still has entries of the policy's,
// which may change.
size_t max_open_ends(const EngineState& state) {
  const bool is_delivered = std::ranges::all_of(
      state.unconfirmed_ends,
      [](const auto& end) { return end.iteration->launches.empty(); });
  if (state.policy.is_learning() || !is_delivered) return 0;
  return static_cast<size_t>(state.options.max_unconfirmed_iterations - 1);
}

}  // namespace

bool may_defer_status_check(const EngineState& state,
                            const Iteration& iteration) {
  if (iteration.has_chained()) return false;
  const bool runs_ahead = runs_ahead_of_peers(iteration.sequence);
  // What a user's hook returns may fail on one rank alone, which is to be told
  // with the end: its results come first, and that is no wait for peers only
  // where the host runs ahead of them.
  if (!state.policy.hook_traits().fails_by_network_only && !runs_ahead) {
    return false;
  }
  return state.options.defers_status_check.value_or(runs_ahead);
}

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
    confirm_oldest_end(state, /*turn=*/nullptr);
  }
}

void confirm_known_ends(EngineState& state) {
  const size_t max_open = max_open_ends(state);
  while (!state.unconfirmed_ends.empty() &&
         (state.unconfirmed_ends.size() > max_open ||
          state.peers.is_over(state.unconfirmed_ends.front().exchange))) {
    confirm_oldest_end(state, /*turn=*/nullptr);
  }
}

int max_ends_behind(const EngineState& state) {
  const bool may_defer = state.options.defers_status_check.value_or(
      runs_ahead_of_peers(state.policy.sequence()));
  return may_defer ? state.options.max_unconfirmed_iterations - 1 : 0;
}

void confirm_ends_before(EngineState& state, OwnTurn& turn) {
  while (!state.unconfirmed_ends.empty()) confirm_oldest_end(state, &turn);
}

}  // namespace brigade
