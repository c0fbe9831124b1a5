#include "brigade/engine/recovery.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/message_of.h"
#include "brigade/comm/timed_wait.h"
#include "brigade/engine/failure.h"
#include "brigade/engine/hook_scope.h"
#include "brigade/engine/launching.h"
#include "brigade/engine/launching_apart.h"
#include "brigade/engine/progress.h"
#include "brigade/engine/stream_join.h"

namespace brigade {

using std::chrono::milliseconds;

void exchange_failed(EngineState& state) {
  state.phase = is_between(state.phase) ? Phase::kIdle : Phase::kLost;
}

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
      state.peers.met();
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
