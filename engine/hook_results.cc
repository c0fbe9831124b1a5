#include "brigade/engine/hook_results.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/timed_wait.h"

namespace brigade {
namespace {

std::string describe(const HookTraits& hook) {
  return hook.name.empty() ? "the comm hook"
                           : absl::StrCat("comm hook ", hook.name);
}

// The one that stands for all, where all are to blame.
Collective& first_unit(const Iteration& iteration) {
  return **std::ranges::find_if(
      iteration.sequence,
      [](const Collective* entry) { return entry->unit().has_value(); });
}

void await_result(EngineState& state, Launch& launch) {
  if (!launch.future) return;
  const std::chrono::milliseconds timeout =
      state.timeout_of(*launch.collective);
  launch.is_overdue = !wait_for(*launch.future, timeout);
  TORCH_CHECK(!launch.is_overdue, "the future of ",
              describe(state.policy.hook_traits()), " was not done within ",
              timeout.count() / 1000.0,
              " s, the group's timeout.\nComplete it on every rank.");
  launch.future->waitAndThrow();
  state.observations.timeline.waited_for(*launch.collective->unit());
}

// Of a hook's continuations, which run in another order on each rank. One unit
// has but one order.
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

}  // namespace

at::Tensor result_of(const Launch& launch) {
  if (!launch.future) return {};
  return launch.collective->result_of(launch.future->value());
}

std::optional<Failure> collect(EngineState& state, Iteration& iteration,
                               Results& results) {
  std::optional<Failure> failure;
  for (Launch& launch : undelivered(iteration)) {
    try {
      await_result(state, launch);
      if (!failure) results.emplace_back(launch.collective, result_of(launch));
    } catch (...) {
      if (failure) continue;
      failure = failure_of(state, iteration, ErrorSource::kFuture,
                           *launch.collective);
    }
  }
  if (!failure) failure = find_unordered_collectives(state, iteration);
  return failure;
}

std::optional<Failure> launch_chained(EngineState& state,
                                      Iteration& iteration) {
  for (size_t group = 0; group < state.groups.size(); ++group) {
    ChainedCollectives& chained = iteration.chained[group];
    GroupAccount& account = state.peers.on(group);
    try {
      const ChainedCollectives::Scope none_behind_these(chained);
      chained.launch(group_timeout(*state.groups[group]),
                     [&account](const std::function<void()>& launch) {
                       account.count(launch);
                     });
    } catch (...) {
      // Nothing can stand in for what its peers have launched.
      account.abort();
      return failure_of(state, iteration, ErrorSource::kFuture,
                        first_unit(iteration));
    }
  }
  return std::nullopt;
}

}  // namespace brigade
