#include "brigade/engine/agreement/deferral.h"

#include <algorithm>
#include <span>

namespace brigade {
namespace {

// On the CPU results keep the host waiting for peers anyway.
bool runs_ahead_of_peers(std::span<Collective* const> sequence) {
  return std::ranges::none_of(sequence, [](const Collective* collective) {
    return collective->device().is_cpu();
  });
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

// What an iteration teaches counts before the next. One that could not be
// delivered still has entries of the policy's, which may change.
size_t max_open_ends(const EngineState& state) {
  const bool is_delivered = std::ranges::all_of(
      state.unconfirmed_ends,
      [](const auto& end) { return end.iteration->launches.empty(); });
  if (state.policy.is_learning() || !is_delivered) return 0;
  return static_cast<size_t>(state.options.max_unconfirmed_iterations - 1);
}

int max_ends_behind(const EngineState& state) {
  const bool may_defer = state.options.defers_status_check.value_or(
      runs_ahead_of_peers(state.policy.sequence()));
  return may_defer ? state.options.max_unconfirmed_iterations - 1 : 0;
}

}  // namespace brigade
