#include "brigade/engine/agreement/exchange.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// A rank that has told of its end and goes on gives nothing: its device may be
// waiting for sums that a rank which wants a unit launches behind it.
std::vector<int64_t> units_to_give(const EngineState& state,
                                   std::span<const RankStatus> by_rank) {
  const bool waits_at_end = !state.options.defers_status_check.value_or(true);
  if (!waits_at_end &&
      std::ranges::count(by_rank, StatusKind::kEnd, &RankStatus::kind) > 0) {
    return {};
  }
  return wanted_units(by_rank);
}

}  // namespace

PendingExchange begin_exchange(EngineState& state, const Iteration& iteration,
                               RankStatus own, bool tells_launches) {
  own.iteration = iteration.number;
  const uint64_t of_sequence = state.policy.fingerprint();
  own.fingerprint = own.fingerprint == 0
                        ? of_sequence
                        : c10::hash_combine(of_sequence, own.fingerprint);
  const bool is_end = own.kind == StatusKind::kEnd;
  own.proposal =
      is_end ? state.policy.proposal() : state.policy.digest_to_give();
  own.order = state.policy.order_digest(is_end);
  return state.peers.begin_exchange(own, tells_launches);
}

StatusComparison exchange_and_give(EngineState& state,
                                   const Iteration& iteration,
                                   const RankStatus& own, bool tells_launches,
                                   std::optional<milliseconds> patience) {
  PendingExchange pending =
      begin_exchange(state, iteration, own, tells_launches);
  while (true) {
    StatusComparison found = state.peers.await(pending, patience);
    if (found.status.ok()) {
      if (wants_unit(own)) state.policy.give({&own.unit, 1}, own.unit);
      return found;
    }
    const std::vector<int64_t> wanted = units_to_give(state, found.by_rank);
    if (wanted.empty()) return found;
    state.policy.give(wanted, own.unit);
    if (wants_unit(own)) {
      found.status = absl::OkStatus();
      return found;
    }
    pending = state.peers.begin_again(pending);
  }
}

}  // namespace brigade
