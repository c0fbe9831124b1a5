#include "brigade/engine/launching/hook_results.h"

#include <c10/util/Exception.h>

#include <chrono>

#include "brigade/comm/group/group_timeout.h"
#include "brigade/comm/streams/timed_wait.h"
#include "brigade/engine/launching/launching_chained.h"

namespace brigade {
namespace {

void await_result(EngineState& state, Launch& launch) {
  if (!launch.future) return;
  const std::chrono::milliseconds timeout = group_timeout(*state.group);
  launch.is_overdue = !wait_for(*launch.future, timeout);
  TORCH_CHECK(!launch.is_overdue, "the future of ",
              describe(state.policy.hook_traits()), " was not done within ",
              timeout.count() / 1000.0,
              " s, the group's timeout.\nComplete it on every rank.");
  launch.future->waitAndThrow();
  state.observations.timeline.waited_for(*launch.collective->unit());
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

}  // namespace brigade
