#include "brigade/engine/launching/launching_chained.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group/group_timeout.h"

namespace brigade {
namespace {

// The one that stands for all, where all are to blame.
Collective& first_unit(const Iteration& iteration) {
  return **std::ranges::find_if(
      iteration.sequence,
      [](const Collective* entry) { return entry->unit().has_value(); });
}

}  // namespace

std::optional<Failure> launch_chained(EngineState& state,
                                      Iteration& iteration) {
  try {
    const ChainedCollectives::Scope none_after_these(iteration.chained);
    iteration.chained.launch(group_timeout(*state.group),
                             [&](const std::function<void()>& launch) {
                               state.peers.count(launch);
                             });
    return std::nullopt;
  } catch (...) {
    // Nothing can stand in for what its peers have launched.
    state.peers.set_cannot_continue();
    return failure_of(state, iteration, ErrorSource::kFuture,
                      first_unit(iteration));
  }
}

std::optional<Failure> find_unordered_collectives(const EngineState& state,
                                                  const Iteration& iteration) {
  const bool has_seen_any = iteration.continuations.has_value() &&
                            iteration.continuations->has_seen_any();
  if (!has_seen_any || num_units(iteration.sequence) < 2) return std::nullopt;
  Failure failure =
      failure_of(state, iteration, ErrorSource::kFuture, first_unit(iteration));
  failure.error = std::make_exception_ptr(std::runtime_error(absl::StrCat(
      describe(state.policy.hook_traits()),
      " launched collectives in a continuation of its future: "
      "continuations run in another order on each rank, so that results "
      "are wrong.\nLaunch them by then_collective().")));
  return failure;
}

}  // namespace brigade
