#include "brigade/reducer/delivery.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <ranges>

#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/streams/stream_join.h"
#include "brigade/comm/streams/timed_wait.h"
#include "brigade/reducer/launching.h"

namespace brigade {
namespace {

// A collective without a unit is waited for by who needs its result.
auto with_unit(Iteration& iteration) {
  return iteration.launches | std::views::filter([](const Launch& launch) {
           return launch.collective->unit().has_value();
         });
}

// Undefined: nothing travelled, or nothing is to be handed over. REQUIRES: its
// future is complete.
at::Tensor result_of(const Launch& launch) {
  if (!launch.future) return {};
  return launch.collective->result_of(launch.future->value());
}

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
Failure failed_delivery(const Iteration& iteration, Collective& collective) {
  if (const Launch* const dependency = failed_dependency(iteration)) {
    return failure_of(iteration.occasion, ErrorSource::kFuture,
                      *dependency->collective);
  }
  return failure_of(iteration.occasion, ErrorSource::kDelivery, collective);
}

void await_result(Launch& launch, const HookTraits& hook,
                  TimelineRecorder& timeline,
                  std::chrono::milliseconds timeout) {
  if (!launch.future) return;
  launch.is_overdue = !wait_for(*launch.future, timeout);
  TORCH_CHECK(!launch.is_overdue, "the future of ", describe(hook),
              " was not done within ", timeout.count() / 1000.0,
              " s, the group's timeout.\nComplete it on every rank.");
  launch.future->waitAndThrow();
  timeline.waited_for(*launch.collective->unit());
}

}  // namespace

std::optional<Failure> deliver_as_results_come(Iteration& iteration,
                                               TimelineRecorder& timeline) {
  std::optional<Failure> failure;
  for (const Launch& launch : with_unit(iteration)) {
    try {
      if (launch.future) {
        launch.future->waitAndThrow();
        timeline.waited_for(*launch.collective->unit());
      }
    } catch (...) {
      if (!failure) {
        failure = failure_of(iteration.occasion, ErrorSource::kFuture,
                             *launch.collective);
      }
    }
    if (failure) continue;
    try {
      const at::Tensor result = result_of(launch);
      if (!iteration.is_shadow) launch.collective->deliver(result);
    } catch (...) {
      failure = failed_delivery(iteration, *launch.collective);
    }
  }
  return failure;
}

std::optional<Failure> collect(Iteration& iteration, const HookTraits& hook,
                               TimelineRecorder& timeline,
                               std::chrono::milliseconds timeout,
                               Results& results) {
  std::optional<Failure> failure;
  for (Launch& launch : with_unit(iteration)) {
    try {
      await_result(launch, hook, timeline, timeout);
      if (!failure) results.emplace_back(launch.collective, result_of(launch));
    } catch (...) {
      if (failure) continue;
      failure = failure_of(iteration.occasion, ErrorSource::kFuture,
                           *launch.collective);
    }
  }
  if (!failure) failure = find_unordered_collectives(iteration, hook);
  return failure;
}

std::optional<Failure> deliver(const Iteration& iteration,
                               const Results& results) {
  if (iteration.is_shadow) return std::nullopt;
  for (const auto& [collective, result] : results) {
    try {
      collective->deliver(result);
    } catch (...) {
      return failed_delivery(iteration, *collective);
    }
  }
  return std::nullopt;
}

void drain(Iteration& iteration, std::chrono::milliseconds timeout) {
  iteration.chained.cancel(timeout);
  for (Launch& launch : iteration.launches) {
    if (!launch.has_travelled || launch.is_overdue) continue;
    try {
      if (launch.future) {
        launch.is_overdue = !wait_for(*launch.future, timeout);
        if (launch.is_overdue) continue;
        launch.future->wait();
      }
      const c10::Device device = launch.collective->device();
      // Waiting orders streams only, and not the ones that the user works on.
      if (!device.is_cpu()) current_stream(device).synchronize();
    } catch (...) {
      TORCH_WARN("Reducer: while waiting for ",
                 describe_place(*launch.collective, iteration.occasion), ": ",
                 message_of(std::current_exception()));
    }
  }
}

}  // namespace brigade
