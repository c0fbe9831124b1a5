#include "brigade/engine/recovery.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/close_group.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/message_of.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm/timed_wait.h"
#include "brigade/engine/delivery.h"
#include "brigade/engine/hook_scope.h"
#include "brigade/engine/launching.h"
#include "brigade/engine/stream_join.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

// Of the policy's sequence.
RankStatus begin_status(const EngineState& state) {
  std::string words = state.policy.describe_sequence();
  if (const std::string& hook = state.policy.hook_traits().name;
      !hook.empty()) {
    absl::StrAppend(&words, ", comm hook ", hook);
  }
  return {.kind = StatusKind::kBegin,
          .fingerprint = state.policy.backward_digest(),
          .text = status_text(words)};
}

// Ranks differ, or one has failed. If an iteration is under way, it is over.
void exchange_failed(EngineState& state, bool have_met) {
  if (is_between(state.phase)) {
    state.phase = have_met ? Phase::kAtSyncPoint : Phase::kIdle;
  } else {
    state.phase = have_met ? Phase::kResynced : Phase::kLost;
  }
}

// Collectives that may never end keep their memory; gradients go to another.
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

// So that nothing writes into an entry's memory behind the user's back.
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

void close_groups(EngineState& state) {
  state.peers.note_lost_group();
  for (const auto& group : state.groups) close_group(*group);
}

void close_and_abandon(EngineState& state, Iteration& iteration) {
  close_groups(state);
  abandon_buffers(state, iteration);
}

void tell_of_loss(EngineState& state, const Iteration& iteration,
                  const absl::Status& why) {
  state.peers.tell_of_loss({.kind = StatusKind::kFailed,
                            .iteration = iteration.number,
                            .text = status_text(why.ToString())});
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

// What `own` has for a fingerprint goes with that of the sequence.
PendingExchange begin_exchange(EngineState& state, const Iteration& iteration,
                               RankStatus own, bool tells_launches = true) {
  own.iteration = iteration.number;
  const uint64_t of_sequence = state.policy.fingerprint();
  own.fingerprint = own.fingerprint == 0
                        ? of_sequence
                        : c10::hash_combine(of_sequence, own.fingerprint);
  if (own.kind == StatusKind::kEnd) own.proposal = state.policy.proposal();
  return state.peers.begin_exchange(own, tells_launches);
}

// Gets a comparison by `await`, and brings all ranks to the same place if they
// are not.
template <typename Await>
StatusComparison compare_by(EngineState& state, Iteration& iteration,
                            const Await& await,
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

// An iteration that this rank is in when it looks at ends of earlier ones.
struct OwnTurn {
  Iteration& iteration;
  RankStatus own;
  std::optional<milliseconds> patience;
  bool is_told = false;
};

StatusComparison take_turn(EngineState& state, OwnTurn& turn) {
  turn.is_told = true;
  return compare_by(
      state, turn.iteration,
      [&](std::optional<milliseconds> limit) {
        return state.peers.await(
            begin_exchange(state, turn.iteration, turn.own), limit);
      },
      turn.patience);
}

UnconfirmedEnd take_oldest_end(EngineState& state) {
  UnconfirmedEnd oldest = std::move(state.unconfirmed_ends.front());
  state.unconfirmed_ends.pop_front();
  return oldest;
}

// Ranks that hear that an exchange is refuted have begun different numbers of
// others behind it. All take part in as many as one of them may have begun, and
// so come to the same place: what they launched in each is brought in step
// behind it, since a rank may begin the next only when its device has seen
// that. docs/protocol.md, "Deferred".
//
// `turn`: what this rank is in, if anything.
void follow_up(EngineState& state, OwnTurn* turn,
               std::optional<milliseconds> patience) {
  for (int i = 1; i < state.options.max_unconfirmed_iterations &&
                  !state.peers.has_lost_group();
       ++i) {
    if (!state.unconfirmed_ends.empty()) {
      const UnconfirmedEnd end = take_oldest_end(state);
      compare_by(
          state, *end.iteration,
          [&](std::optional<milliseconds> limit) {
            return state.peers.await(end.exchange, limit);
          },
          patience);
    } else if (turn != nullptr && !turn->is_told) {
      if (take_turn(state, *turn).status.ok()) drain(state, turn->iteration);
    } else {
      const auto none = state.make_iteration(state.observations.begun);
      OwnTurn nothing = {.iteration = *none,
                         .own = {.kind = StatusKind::kIdle},
                         .patience = patience};
      take_turn(state, nothing);
    }
  }
  state.unconfirmed_ends.clear();
  if (!state.peers.has_lost_group()) state.peers.met();
}

void confirm_oldest_end(EngineState& state, OwnTurn* turn) {
  const UnconfirmedEnd end = take_oldest_end(state);
  const size_t num_behind = state.unconfirmed_ends.size();
  const auto patience = turn != nullptr ? turn->patience : std::nullopt;
  try {
    const StatusComparison comparison = compare_by(
        state, *end.iteration,
        [&](std::optional<milliseconds> limit) {
          StatusComparison found = state.peers.await(end.exchange, limit);
          if (!found.status.ok() && state.peers.has_gone_on()) {
            found.deficit = absl::FailedPreconditionError(
                "A rank that had delivered has launched other collectives on "
                "the group since, so that its connections are closed.");
            tell_of_loss(state, *end.iteration, found.deficit.status());
          }
          return found;
        },
        patience);
    if (comparison.status.ok()) {
      return state.policy.on_end_confirmed(comparison.has_agreed_proposal);
    }
    follow_up(state, turn, patience);
    throw_if_apart(
        comparison,
        absl::StrCat(
            state.options.name, ": iteration ", end.iteration->number,
            num_behind == 0 ? ""
                            : absl::StrCat(", and ", num_behind, " behind it"),
            ", whose results this rank has delivered without knowing it"));
  } catch (...) {
    state.unconfirmed_ends.clear();
    state.policy.on_end_refuted();
    throw;
  }
}

}  // namespace

void connect(EngineState& state) {
  state.peers.connect();
  if (!state.options.has_control_channel) return;
  state.observations.watch_stalls(
      state.group(), state.peers.store_prefix(),
      {.engine = state.options.name,
       .unit = std::string(state.policy.unit_word())},
      state.describe_progress);
}

// Peers are waited for where lengths could clash: before the first entry of a
// sequence, and before one whose result decides what is launched. A sequence is
// agreed on where it is made, since afterwards a peer may wait for something
// else than this rank's next forward or first gradient.
void agree_on_sequence(EngineState& state, Iteration& iteration) {
  if (!state.peers.is_connected()) connect(state);
  if (state.peers.is_agreed(state.policy.fingerprint())) return;
  end_together(state, iteration, begin_status(state));
  state.peers.set_agreed(state.policy.fingerprint());
  state.leave_sync_point();
}

void begin_together(EngineState& state) {
  throw_if_apart(compare(state, *state.iteration, begin_status(state)),
                 state.options.name);
  state.iteration->has_begun_together = true;
}

bool end_together(EngineState& state, Iteration& iteration,
                  const RankStatus& own) {
  try {
    if (!state.peers.is_connected()) connect(state);
    const StatusComparison comparison = compare(state, iteration, own);
    throw_if_apart(comparison, state.options.name);
    return comparison.has_agreed_proposal;
  } catch (...) {
    state.take_iteration();
    ++state.observations.aborted;
    state.policy.on_iteration_over(Outcome::kAborted, iteration.is_shadow);
    throw;
  }
}

StatusComparison compare(EngineState& state, Iteration& iteration,
                         RankStatus own, std::optional<milliseconds> patience) {
  OwnTurn turn = {.iteration = iteration, .own = own, .patience = patience};
  try {
    while (!state.unconfirmed_ends.empty()) confirm_oldest_end(state, &turn);
  } catch (...) {
    if (!turn.is_told) abandon_buffers(state, iteration);
    throw;
  }
  StatusComparison comparison = take_turn(state, turn);
  if (!comparison.status.ok()) follow_up(state, /*turn=*/nullptr, patience);
  return comparison;
}

void ask_together(EngineState& state, const RankStatus& own) {
  Iteration& iteration = *state.iteration;
  const StatusComparison comparison = compare_by(
      state, iteration,
      [&](std::optional<milliseconds> limit) {
        StatusComparison found = state.peers.await(
            begin_exchange(state, iteration, own, /*tells_launches=*/false),
            limit);
        // Ranks may have launched unequally much, but each launches the rest.
        found.deficit = LaunchDeficit{};
        if (!found.status.ok()) {
          launch_rest(state, iteration);
          state.peers.met();
        }
        return found;
      },
      /*patience=*/std::nullopt);
  throw_if_apart(comparison, state.options.name);
}

bool may_defer_status_check(const EngineState& state,
                            const Iteration& iteration) {
  if (iteration.has_chained()) return false;
  // On the CPU results keep the host waiting for peers anyway.
  const bool runs_ahead =
      std::ranges::none_of(iteration.launches, [](const Launch& launch) {
        return launch.collective->device().is_cpu();
      });
  // What a user's hook returns may fail on one rank alone, which is to be told
  // with the end: its results come first, and that is no wait for peers only
  // where the host runs ahead of them.
  if (!state.policy.hook_traits().fails_by_network_only && !runs_ahead) {
    return false;
  }
  return state.options.defers_status_check.value_or(runs_ahead);
}

void end_unconfirmed(EngineState& state, std::shared_ptr<Iteration> iteration,
                     const RankStatus& own) {
  try {
    PendingExchange exchange = begin_exchange(state, *iteration, own);
    state.unconfirmed_ends.push_back(
        {.iteration = std::move(iteration), .exchange = std::move(exchange)});
  } catch (...) {
    abandon_buffers(state, *iteration);
    ++state.observations.aborted;
    state.policy.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
    throw;
  }
  if (is_between(state.phase)) state.phase = Phase::kAtSyncPoint;
}

void confirm_ends(EngineState& state, size_t num_left) {
  while (state.unconfirmed_ends.size() > num_left) {
    confirm_oldest_end(state, /*turn=*/nullptr);
  }
}

// What an iteration teaches counts before the next one is prepared. One that
// could not be delivered still has entries of the policy's, which may change.
size_t num_ends_left_open(const EngineState& state) {
  const bool is_delivered = std::ranges::all_of(
      state.unconfirmed_ends,
      [](const auto& end) { return end.iteration->launches.empty(); });
  if (state.policy.is_learning() || !is_delivered) return 0;
  return static_cast<size_t>(state.options.max_unconfirmed_iterations - 1);
}

void abort_iteration(EngineState& state) {
  const bool is_known =
      state.phase == Phase::kLost || state.phase == Phase::kResynced;
  const std::shared_ptr<Iteration> iteration = state.take_iteration();
  state.membership.mark_finished(iteration->preparation,
                                 /*may_be_repeated=*/false);
  ++state.observations.aborted;
  state.policy.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
  if (is_known) return;
  if (state.options.launches_rest_when_failing &&
      iteration->has_begun_together) {
    try {
      launch_rest(state, *iteration);
    } catch (...) {
      for (size_t group = 0; group < state.groups.size(); ++group) {
        state.peers.on(group).lose();
      }
      iteration->failure = message_of(std::current_exception());
    }
  }
  if (iteration->failure.empty()) {
    iteration->failure = "an exception ended backward";
  }
  std::string problem;
  try {
    const StatusComparison comparison =
        compare(state, *iteration,
                {.kind = StatusKind::kFailed,
                 .unit = next_unit(*iteration),
                 .text = status_text(iteration->failure)},
                state.options.failure_patience);
    if (comparison.deficit.ok()) return;
    problem = std::string(comparison.deficit.status().message());
  } catch (...) {
    problem = message_of(std::current_exception());
  }
  TORCH_WARN(state.options.name, ": while aborting ",
             describe(state.occasion(iteration->number)), ": ", problem);
}

void abort_group(EngineState& state, const RankStatus& last_words) {
  state.peers.tell_of_loss(last_words);
  close_groups(state);
}

void call_apart(EngineState& state, std::string_view doing,
                const std::function<void()>& collective) {
  const WaitForPeers waiting(*state.observations.progress);
  try {
    collective();
  } catch (...) {
    abort_group(state,
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
