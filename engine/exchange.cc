#include "brigade/engine/exchange.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/peer_error.h"
#include "brigade/engine/failure.h"
#include "brigade/engine/progress.h"
#include "brigade/engine/recovery.h"

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

// The first that has not arrived, or the last one launched.
std::string describe_awaited(const EngineState& state,
                             const Iteration& iteration) {
  const auto& launches = iteration.launches;
  if (launches.empty()) return describe(state.occasion(iteration.number));
  auto awaited = std::ranges::find_if(launches, is_pending);
  if (awaited == launches.end()) --awaited;
  return describe_place(state, *awaited->collective, iteration.number);
}

}  // namespace

PendingExchange begin_exchange(EngineState& state, const Iteration& iteration,
                               RankStatus own, bool tells_launches) {
  own.iteration = iteration.number;
  const uint64_t of_sequence = state.policy.fingerprint();
  own.fingerprint = own.fingerprint == 0
                        ? of_sequence
                        : c10::hash_combine(of_sequence, own.fingerprint);
  own.proposal = own.kind == StatusKind::kEnd ? state.policy.proposal()
                                              : state.policy.digest_to_give();
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

StatusComparison compare_by(EngineState& state, Iteration& iteration,
                            const AwaitComparison& await,
                            std::optional<milliseconds> patience) {
  const WaitForPeers waiting(*state.observations.progress);
  std::optional<StatusComparison> comparison;
  try {
    comparison = await(patience);
  } catch (const c10::DistBackendError& error) {
    exchange_failed(state);
    const std::string where = describe_awaited(state, iteration);
    close_and_abandon(state, iteration);
    throw_peer_error(absl::StrCat(state.options.name, ": ", where),
                     std::make_exception_ptr(
                         std::runtime_error(error.what_without_backtrace())));
  } catch (...) {
    exchange_failed(state);
    abandon_buffers(state, iteration);
    throw;
  }
  if (comparison->status.ok()) {
    if (is_between(state.phase)) state.phase = Phase::kAtSyncPoint;
  } else {
    exchange_failed(state);
    resync(state, iteration, *comparison);
  }
  return *std::move(comparison);
}

}  // namespace brigade
