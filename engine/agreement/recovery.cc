#include "brigade/engine/agreement/recovery.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_timeout.h"
#include "brigade/comm/streams/stream_join.h"
#include "brigade/comm/streams/timed_wait.h"
#include "brigade/engine/launching/failure.h"
#include "brigade/engine/launching/hook_scope.h"
#include "brigade/engine/launching/launching.h"
#include "brigade/engine/launching/launching_apart.h"
#include "brigade/engine/observing/progress.h"

namespace brigade {

using std::chrono::milliseconds;

namespace {

// The first that has not arrived, or the last one launched.
std::string describe_awaited(const EngineState& state,
                             const Iteration& iteration) {
  const auto& launches = iteration.launches;
  if (launches.empty()) return describe(state.occasion(iteration.number));
  auto awaited = std::ranges::find_if(launches, is_pending);
  if (awaited == launches.end()) --awaited;
  return describe_place(state, *awaited->collective, iteration.number);
}

// Ranks differ, or one does not answer: an iteration that is under way is over.
void exchange_failed(EngineState& state) {
  state.phase = is_between(state.phase) ? Phase::kIdle : Phase::kLost;
}

// Brings all ranks to the same place after an exchange that has failed. If that
// can't be done, `comparison.deficit` is an error, and the groups are closed.
void resync(EngineState& state, Iteration& iteration,
            StatusComparison& comparison) {
  state.observations.begun =
      std::max(state.observations.begun, comparison.iteration);
  const bool lacks_opening = comparison.opening.num_collectives > 0;
  if (comparison.deficit.ok() &&
      (lacks_opening || *comparison.deficit != LaunchDeficit{})) {
    const HookScope scope(iteration.preparer);
    try {
      if (lacks_opening) launch_opening_for_peers(state, comparison.opening);
      make_up_deficit(state, iteration, *comparison.deficit);
      state.peers.restart_counts();
    } catch (...) {
      comparison.deficit = absl::UnavailableError(
          absl::StrCat("this rank could not be brought in step: ",
                       message_of(std::current_exception())));
      tell_of_abort(state, iteration, comparison.deficit.status());
    }
  }
  if (!comparison.deficit.ok()) return close_and_abandon(state, iteration);
  drain(state, iteration);
  state.phase =
      is_between(state.phase) ? Phase::kAtSyncPoint : Phase::kResynced;
}

}  // namespace

StatusComparison compare_and_recover(EngineState& state, Iteration& iteration,
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

void close_and_abandon(EngineState& state, Iteration& iteration) {
  state.close_groups();
  abandon_buffers(state, iteration);
}

void abandon_buffers(EngineState& state, Iteration& iteration) {
  for (auto& chained : iteration.chained) chained.cancel(milliseconds(0));
  std::vector<Collective*> in_flight;
  for (const Launch& launch : iteration.launches) {
    if (is_pending(launch)) in_flight.push_back(launch.collective);
  }
  if (in_flight.empty()) return;
  keep_until_done(state.policy.abandon(in_flight), iteration);
  state.adopt_sequence();
}

void drain(EngineState& state, Iteration& iteration) {
  const WaitForPeers waiting(*state.observations.progress);
  for (size_t group = 0; group < state.groups.size(); ++group) {
    iteration.chained[group].cancel(group_timeout(*state.groups[group]));
  }
  for (Launch& launch : iteration.launches) {
    if (!launch.has_travelled || launch.is_overdue) continue;
    try {
      if (launch.future) {
        launch.is_overdue =
            !wait_for(*launch.future, state.timeout_of(*launch.collective));
        if (launch.is_overdue) continue;
        launch.future->wait();
      }
      const c10::Device device = launch.collective->device();
      // Waiting orders streams only, and not the ones that the user works on.
      if (!device.is_cpu()) current_stream(device).synchronize();
    } catch (...) {
      TORCH_WARN(state.options.name, ": while waiting for ",
                 describe_place(state, *launch.collective, iteration.number),
                 ": ", message_of(std::current_exception()));
    }
  }
  abandon_buffers(state, iteration);
}

void tell_of_abort(EngineState& state, const Iteration& iteration,
                   const absl::Status& why) {
  state.peers.tell_of_abort({.kind = StatusKind::kFailed,
                             .iteration = iteration.number,
                             .text = status_text(why.ToString())});
}

void keep_until_done(std::shared_ptr<void> kept, const Iteration& iteration) {
  for (const Launch& launch : iteration.launches) {
    if (!launch.future) continue;
    launch.future->addCallback([kept](c10::ivalue::Future&) {},
                               /*uses_future=*/false);
  }
}

}  // namespace brigade
