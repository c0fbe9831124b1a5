#include "brigade/engine/agreement/rank_agreement.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "brigade/engine/agreement/connect.h"
#include "brigade/engine/agreement/exchange.h"
#include "brigade/engine/agreement/follow_up.h"
#include "brigade/engine/agreement/own_exchange.h"
#include "brigade/engine/agreement/recovery.h"
#include "brigade/engine/agreement/unconfirmed_ends.h"
#include "brigade/engine/launching/launching.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Of the policy's sequence.
RankStatus begin_status(const EngineState& state) {
  std::string words = state.policy.describe_sequence();
  if (const std::string& hook = state.policy.hook_traits().name;
      !hook.empty()) {
    absl::StrAppend(&words, ", comm hook ", hook);
  }
  return {.kind = StatusKind::kBegin,
          .fingerprint = state.policy.backward_digest(),
          .text = status_text(words)};
}

}  // namespace

// Peers are waited for where lengths could clash: before the first entry of a
// sequence, and before one whose result decides what is launched. A sequence is
// agreed on where it is made, since afterwards a peer may wait for something
// else than this rank's next forward or first gradient.
void agree_on_sequence(EngineState& state, Iteration& iteration) {
  if (!state.peers.is_connected()) connect(state);
  if (state.peers.is_agreed(state.policy.fingerprint())) return;
  end_together(state, iteration, begin_status(state));
  state.peers.set_agreed(state.policy.fingerprint());
  state.leave_sync_point();
}

void begin_together(EngineState& state) {
  const StatusComparison comparison =
      compare(state, *state.iteration, begin_status(state));
  throw_if_apart(comparison, state.options.name);
  state.iteration->has_begun_together = true;
  state.policy.on_begun_together(comparison.alike.orders);
}

ToldAlike end_together(EngineState& state, Iteration& iteration,
                       const RankStatus& own) {
  try {
    if (!state.peers.is_connected()) connect(state);
    const StatusComparison comparison = compare(state, iteration, own);
    throw_if_apart(comparison, state.options.name);
    return comparison.alike;
  } catch (...) {
    state.take_iteration();
    ++state.observations.aborted;
    state.policy.on_iteration_over(Outcome::kAborted, iteration.is_shadow);
    throw;
  }
}

StatusComparison compare(EngineState& state, Iteration& iteration,
                         RankStatus own, std::optional<milliseconds> patience) {
  OwnExchange exchange = {
      .iteration = iteration, .own = own, .patience = patience};
  try {
    confirm_ends_before(state, exchange);
  } catch (...) {
    if (!exchange.is_told) abandon_buffers(state, iteration);
    throw;
  }
  StatusComparison comparison = tell_and_compare(state, exchange);
  if (!comparison.status.ok()) follow_up(state, /*exchange=*/nullptr, patience);
  return comparison;
}

ToldAlike ask_together(EngineState& state, const RankStatus& own) {
  Iteration& iteration = *state.iteration;
  const StatusComparison comparison = compare_and_recover(
      state, iteration,
      [&](std::optional<milliseconds> limit) {
        StatusComparison found = exchange_and_give(
            state, iteration, own, /*tells_launches=*/false, limit);
        if (!found.status.ok()) {
          launch_rest(state, iteration);
          state.peers.restart_counts();
        }
        return found;
      },
      /*patience=*/std::nullopt);
  throw_if_apart(comparison, state.options.name);
  return comparison.alike;
}

}  // namespace brigade
