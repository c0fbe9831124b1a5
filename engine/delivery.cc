#include "brigade/engine/delivery.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "brigade/comm/errors/message_of.h"
#include "brigade/engine/agreement.h"
#include "brigade/engine/launching/failure.h"
#include "brigade/engine/launching/hook_results.h"
#include "brigade/engine/launching/launching_chained.h"
#include "brigade/engine/state/collective_error.h"

namespace brigade {
namespace {

// Null unless an entry without a unit has failed, whose result a unit's
// delivery waits for: the failure is its own.
const Launch* failed_dependency(const Iteration& iteration) {
  const auto found =
      std::ranges::find_if(iteration.launches, [](const Launch& launch) {
        return !launch.collective->unit() && launch.future &&
               launch.future->completed() && launch.future->hasError();
      });
  return found == iteration.launches.end() ? nullptr : &*found;
}

// Of the exception that is being handled, of a delivery.
Failure failed_delivery(const EngineState& state, const Iteration& iteration,
                        Collective& collective) {
  if (const Launch* const dependency = failed_dependency(iteration)) {
    return failure_of(state, iteration, ErrorSource::kFuture,
                      *dependency->collective);
  }
  return failure_of(state, iteration, ErrorSource::kDelivery, collective);
}

[[noreturn]] void abort_delivery(EngineState& state, const Iteration& iteration,
                                 const Failure& failure) {
  ++state.observations.aborted;
  state.policy.on_iteration_over(Outcome::kDeliveryFailed, iteration.is_shadow);
  throw_failure(state, failure, iteration.number);
}

void deliver_as_results_come(EngineState& state, Iteration& iteration) {
  std::optional<Failure> failure;
  for (const Launch& launch : undelivered(iteration)) {
    try {
      if (launch.future) {
        launch.future->waitAndThrow();
        state.observations.timeline.waited_for(*launch.collective->unit());
      }
    } catch (...) {
      if (!failure) {
        failure = failure_of(state, iteration, ErrorSource::kFuture,
                             *launch.collective);
      }
    }
    if (failure) continue;
    try {
      const at::Tensor result = result_of(launch);
      if (!iteration.is_shadow) launch.collective->deliver(result);
    } catch (...) {
      failure = failed_delivery(state, iteration, *launch.collective);
    }
  }
  if (failure) abort_delivery(state, iteration, *failure);
}

// Throws it when peers know, or can't be told.
[[noreturn]] void tell_of_failure(EngineState& state, Iteration& iteration,
                                  const Failure& failure) {
  try {
    compare(state, iteration,
            {.kind = StatusKind::kFailed,
             .unit = static_cast<int64_t>(*failure.collective->unit()),
             .text = status_text(message_of(failure.error))});
  } catch (...) {
    // This rank has an error of its own.
  }
  ++state.observations.aborted;
  state.policy.on_iteration_over(Outcome::kAborted, iteration.is_shadow);
  if (state.policy.hook_traits().throws_own_errors) {
    std::rethrow_exception(failure.error);
  }
  rethrow_hook_error(failure.error, failure.where);
}

// Throws on all ranks alike if one has failed.
void tell_of_results(EngineState& state, Iteration& iteration, StatusKind kind,
                     const std::optional<Failure>& failure) {
  if (failure) tell_of_failure(state, iteration, *failure);
  end_together(state, iteration, {.kind = kind});
}

void deliver(EngineState& state, const Iteration& iteration,
             const Results& results) {
  if (iteration.is_shadow) return;
  for (const auto& [collective, result] : results) {
    try {
      collective->deliver(result);
    } catch (...) {
      abort_delivery(state, iteration,
                     failed_delivery(state, iteration, *collective));
    }
  }
}

void deliver_what_all_ranks_have(EngineState& state, Iteration& iteration) {
  if (!iteration.chained.empty()) {
    // One that a rank has not launched would be waited for in vain.
    const std::optional<Failure> failure = launch_chained(state, iteration);
    tell_of_results(state, iteration, StatusKind::kChained, failure);
  }
  Results results;
  const std::optional<Failure> failure = collect(state, iteration, results);
  tell_of_results(state, iteration, StatusKind::kArrived, failure);
  state.policy.on_end_confirmed();
  deliver(state, iteration, results);
}

void delivered(EngineState& state, const Iteration& iteration) {
  state.observations.timeline.finalized();
  state.policy.on_iteration_over(Outcome::kDelivered, iteration.is_shadow);
  ++state.observations.reduced;
}

}  // namespace

void deliver_all(EngineState& state, Iteration& iteration) {
  if (state.policy.hook_traits().fails_by_network_only) {
    state.policy.on_end_confirmed();
    deliver_as_results_come(state, iteration);
  } else {
    deliver_what_all_ranks_have(state, iteration);
  }
  delivered(state, iteration);
}

void deliver_unconfirmed(EngineState& state,
                         const std::shared_ptr<Iteration>& iteration,
                         const RankStatus& end) {
  if (state.policy.hook_traits().fails_by_network_only) {
    end_unconfirmed(state, iteration, end);
    deliver_as_results_come(state, *iteration);
  } else {
    Results results;
    if (const auto failure = collect(state, *iteration, results)) {
      tell_of_failure(state, *iteration, *failure);
    }
    end_unconfirmed(state, iteration, end);
    deliver(state, *iteration, results);
  }
  delivered(state, *iteration);
  // They hold the results, whose memory is the policy's to let go of, and the
  // policy may have other entries before the end is confirmed.
  iteration->launches.clear();
  iteration->sequence = {};
}

void deliver_first(EngineState& state, const Iteration& iteration) {
  const WaitForPeers waiting(*state.observations.progress);
  Collective& first = *iteration.launches.front().collective;
  try {
    first.deliver(/*result=*/{});  // which waits
  } catch (...) {
    throw_failure(state,
                  failure_of(state, iteration, ErrorSource::kFuture, first),
                  iteration.number);
  }
}

}  // namespace brigade
