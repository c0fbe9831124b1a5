#include "brigade/engine/recovery.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/message_of.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm/timed_wait.h"
#include "brigade/engine/failure.h"
#include "brigade/engine/hook_scope.h"
#include "brigade/engine/launching.h"
#include "brigade/engine/progress.h"
#include "brigade/engine/stream_join.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Ranks differ, or one has failed. If an iteration is under way, it is over.
void exchange_failed(EngineState& state, bool have_met) {
  if (is_between(state.phase)) {
    state.phase = have_met ? Phase::kAtSyncPoint : Phase::kIdle;
  } else {
    state.phase = have_met ? Phase::kResynced : Phase::kLost;
  }
}

void close_and_abandon(EngineState& state, Iteration& iteration) {
  state.close_groups();
  abandon_buffers(state, iteration);
}

// Brings all ranks to the same place.
void resync(EngineState& state, Iteration& iteration,
            StatusComparison& comparison) {
  state.observations.begun =
      std::max(state.observations.begun, comparison.iteration);
  if (comparison.deficit.ok() && *comparison.deficit != LaunchDeficit{}) {
    const HookScope scope(iteration.preparer);
    try {
      launch_deficit(state, iteration, *comparison.deficit);
      state.peers.met();
    } catch (...) {
      comparison.deficit = absl::UnavailableError(
          absl::StrCat("this rank could not be brought in step: ",
                       message_of(std::current_exception())));
      tell_of_loss(state, iteration, comparison.deficit.status());
    }
  }
  if (!comparison.deficit.ok()) return close_and_abandon(state, iteration);
  drain(state, iteration);
  exchange_failed(state, /*have_met=*/true);
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

void tell_of_loss(EngineState& state, const Iteration& iteration,
                  const absl::Status& why) {
  state.peers.tell_of_loss({.kind = StatusKind::kFailed,
                            .iteration = iteration.number,
                            .text = status_text(why.ToString())});
}

PendingExchange begin_exchange(EngineState& state, const Iteration& iteration,
                               RankStatus own, bool tells_launches) {
  own.iteration = iteration.number;
  const uint64_t of_sequence = state.policy.fingerprint();
  own.fingerprint = own.fingerprint == 0
                        ? of_sequence
                        : c10::hash_combine(of_sequence, own.fingerprint);
  if (own.kind == StatusKind::kEnd) own.proposal = state.policy.proposal();
  return state.peers.begin_exchange(own, tells_launches);
}

StatusComparison compare_by(EngineState& state, Iteration& iteration,
                            const AwaitComparison& await,
                            std::optional<milliseconds> patience) {
  const WaitForPeers waiting(*state.observations.progress);
  std::optional<StatusComparison> comparison;
  try {
    comparison = await(patience);
  } catch (const c10::DistBackendError& error) {
    exchange_failed(state, /*have_met=*/false);
    const std::string where = describe_awaited(state, iteration);
    close_and_abandon(state, iteration);
    throw_peer_error(absl::StrCat(state.options.name, ": ", where),
                     std::make_exception_ptr(
                         std::runtime_error(error.what_without_backtrace())));
  } catch (...) {
    exchange_failed(state, /*have_met=*/false);
    abandon_buffers(state, iteration);
    throw;
  }
  if (comparison->status.ok()) {
    if (is_between(state.phase)) state.phase = Phase::kAtSyncPoint;
  } else {
    exchange_failed(state, /*have_met=*/false);
    resync(state, iteration, *comparison);
  }
  return *std::move(comparison);
}

void call_apart(EngineState& state, std::string_view doing,
                const std::function<void()>& collective) {
  const WaitForPeers waiting(*state.observations.progress);
  try {
    collective();
  } catch (...) {
    state.abort_group(
        {.kind = StatusKind::kFailed,
         .iteration = state.observations.begun,
         .text = status_text(message_of(std::current_exception()))});
    throw_peer_error(absl::StrCat(state.options.name, ": ", std::string(doing),
                                  " on rank ", state.group()->getRank()),
                     std::current_exception());
  }
}

void keep_until_done(std::shared_ptr<void> kept, const Iteration& iteration) {
  for (const Launch& launch : iteration.launches) {
    if (!launch.future) continue;
    launch.future->addCallback([kept](c10::ivalue::Future&) {},
                               /*uses_future=*/false);
  }
}

}  // namespace brigade
