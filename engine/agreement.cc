#include "brigade/engine/agreement.h"

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
#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_timeout.h"
#include "brigade/comm/streams/stream_join.h"
#include "brigade/comm/streams/timed_wait.h"
#include "brigade/engine/launching/failure.h"
#include "brigade/engine/launching/launching.h"
#include "brigade/engine/observing/progress.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using Patience = std::optional<milliseconds>;

RankStatus begin_status(const EngineState& state) {
  std::string words = state.policy.describe_sequence();
  if (const std::string& hook = state.policy.hook_traits().name;
      !hook.empty()) {
    absl::StrAppend(&words, ", comm hook ", hook);
  }
  return {.kind = StatusKind::kBegin, .text = status_text(words)};
}

RankStatus send(EngineState& state, const Iteration& iteration,
                RankStatus own) {
  own.iteration = iteration.number;
  const uint64_t of_sequence = state.policy.fingerprint();
  own.fingerprint = own.fingerprint == 0
                        ? of_sequence
                        : c10::hash_combine(of_sequence, own.fingerprint);
  return state.peers.send(own,
                          /*ends_iteration=*/own.kind == StatusKind::kEnd ||
                              own.kind == StatusKind::kFailed);
}

bool has_ended(const RankStatus& rank_status) {
  return rank_status.kind == StatusKind::kEnd;
}

// An iteration that is under way is over, and peers need not be told.
void all_know(EngineState& state) {
  if (!is_between(state.phase)) state.phase = Phase::kOver;
}

std::string describe_awaited(const EngineState& state,
                             const Iteration& iteration) {
  const auto& launches = iteration.launches;
  if (launches.empty()) return describe(state.occasion(iteration.number));
  auto awaited = std::ranges::find_if(launches, is_pending);
  if (awaited == launches.end()) --awaited;
  return describe_place(state, *awaited->collective, iteration.number);
}

// Waits for all that the iteration has launched, so that nothing writes into
// memory of the user's later. Results and their errors are dropped.
void drain(EngineState& state, Iteration& iteration) {
  const WaitForPeers waiting(*state.observations.progress);
  const milliseconds timeout = group_timeout(*state.group);
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
      TORCH_WARN(state.options.name, ": while waiting for ",
                 describe_place(state, *launch.collective, iteration.number),
                 ": ", message_of(std::current_exception()));
    }
  }
  abandon_buffers(state, iteration);
}

bool is_over_for(const RankStatus& rank_status) {
  return has_ended(rank_status) || rank_status.kind == StatusKind::kFailed;
}

bool launches_later(const RankStatus& rank_status) {
  return rank_status.launches_later != 0;
}

uint64_t hash_of_launched(const Iteration& iteration) {
  uint64_t hash = 0;
  for (size_t entry = 0; entry < iteration.sequence.size(); ++entry) {
    hash = c10::hash_combine(hash, iteration.order.is_launched(entry));
  }
  return hash;
}

// Launches zeros for what is left of a sequence. Returns why that can't be
// done; empty: it is done.
std::string launch_substitutes(EngineState& state, Iteration& iteration) {
  try {
    launch_rest(state, iteration);
    return "";
  } catch (...) {
    return message_of(std::current_exception());
  }
}

// Ranks that have not agreed come to the same place: those that have launched
// less than others launch zeros, and tell whether they could. Not before all
// are known to have ended: until then zeros might meet another collective of
// the program. Where ranks begin each iteration together, only those that have
// begun it launch later.
void catch_up(EngineState& state, Iteration& iteration, const RankStatus& own,
              StatusComparison& found, Patience patience) {
  if (found.status.ok() ||
      !std::ranges::any_of(found.by_rank, launches_later)) {
    return;
  }
  if (found.must_close) {
    // On devices peers that have ended wait for these in the user's stream.
    if (launches_later(own) && state.runs_ahead()) {
      launch_substitutes(state, iteration);
    }
    return;
  }
  if (!state.policy.compares_each_iteration() &&
      !std::ranges::any_of(found.by_rank, is_over_for)) {
    return;
  }
  const auto has_launched_as_much = [&](const RankStatus& peer) {
    return peer.kind == StatusKind::kFailed && launches_later(peer) &&
           peer.launched == own.launched;
  };
  if (std::ranges::all_of(found.by_rank, has_launched_as_much)) return;
  RankStatus caught_up = {.kind = StatusKind::kFailed};
  if (launches_later(own)) {
    const std::string problem = launch_substitutes(state, iteration);
    if (!problem.empty()) state.peers.set_cannot_continue();
    caught_up.text = status_text(problem);
  }
  const RankStatus sent = send(state, iteration, caught_up);
  found.must_close = state.peers.await(sent, patience).must_close;
}

// Exchanges `own`, and ends the iteration if ranks do not agree.
StatusComparison compare_or_end(EngineState& state, Iteration& iteration,
                                const RankStatus& own, Patience patience) {
  const WaitForPeers waiting(*state.observations.progress);
  StatusComparison comparison;
  try {
    comparison = state.peers.await(send(state, iteration, own), patience);
    // Peers have delivered what this rank has not launched.
    comparison.must_close |= !comparison.status.ok() && state.runs_ahead() &&
                             own.kind != StatusKind::kEnd &&
                             std::ranges::any_of(comparison.by_rank, has_ended);
    catch_up(state, iteration, own, comparison, patience);
  } catch (const c10::DistBackendError& error) {
    all_know(state);
    const std::string where = describe_awaited(state, iteration);
    state.close_group(error.what_without_backtrace());
    abandon_buffers(state, iteration);
    throw_peer_error(absl::StrCat(state.options.name, ": ", where),
                     std::make_exception_ptr(
                         std::runtime_error(error.what_without_backtrace())));
  } catch (...) {
    all_know(state);
    abandon_buffers(state, iteration);
    throw;
  }
  if (comparison.status.ok()) return comparison;
  all_know(state);
  for (const RankStatus& peer : comparison.by_rank) {
    state.observations.begun =
        std::max(state.observations.begun, peer.iteration);
  }
  if (comparison.must_close) {
    state.close_group(std::string(comparison.status.message()));
    abandon_buffers(state, iteration);
  } else {
    drain(state, iteration);
  }
  return comparison;
}

void confirm_oldest_end(EngineState& state) {
  const UnconfirmedEnd end = state.take_oldest_end();
  const size_t num_later = state.unconfirmed_ends.size();
  try {
    StatusComparison comparison = state.peers.await(end.sent);
    if (comparison.status.ok()) {
      return state.policy.on_end_confirmed();
    }
    comparison.must_close = true;
    state.close_group(std::string(comparison.status.message()));
    throw_if_apart(
        comparison,
        absl::StrCat(
            state.options.name, ": iteration ", end.iteration->number,
            num_later == 0 ? ""
                           : absl::StrCat(", and ", num_later, " after it"),
            ", whose results were delivered before this was known.\nLoad a "
            "checkpoint on all ranks"));
  } catch (...) {
    if (!state.peers.is_closed()) {
      state.close_group(message_of(std::current_exception()));
    }
    state.late_failure = message_of(std::current_exception());
    state.unconfirmed_ends.clear();
    state.policy.on_end_refuted();
    throw;
  }
}

// Peers that have not begun it together wait for a status, not a collective.
bool is_launched_by_peers(const EngineState& state,
                          const Iteration& iteration) {
  return !state.policy.compares_each_iteration() ||
         iteration.has_begun_together;
}

}  // namespace

void connect(EngineState& state) {
  state.peers.connect();
  if (!state.options.has_control_channel) return;
  state.observations.watch_stalls(
      state.group, state.peers.store_prefix(),
      {.engine = state.options.name, .unit = "bucket"},
      state.describe_progress);
}

// A sequence is agreed on where it is made: later a peer may wait for something
// else than this rank's next forward or first gradient.
void agree_on_sequence(EngineState& state, Iteration& iteration) {
  if (!state.peers.is_connected()) connect(state);
  if (state.peers.is_agreed(state.policy.fingerprint())) return;
  end_together(state, iteration, begin_status(state));
  state.peers.set_agreed(state.policy.fingerprint());
}

void begin_together(EngineState& state) {
  const StatusComparison comparison =
      compare(state, *state.iteration, begin_status(state));
  throw_if_apart(comparison, state.options.name);
  state.iteration->has_begun_together = true;
}

void end_together(EngineState& state, Iteration& iteration,
                  const RankStatus& own) {
  try {
    if (!state.peers.is_connected()) connect(state);
    const StatusComparison comparison = compare(state, iteration, own);
    throw_if_apart(comparison, state.options.name);
  } catch (...) {
    state.take_iteration();
    ++state.observations.aborted;
    state.policy.on_iteration_over(Outcome::kAborted, iteration.is_shadow);
    throw;
  }
}

StatusComparison compare(EngineState& state, Iteration& iteration,
                         RankStatus own, Patience patience) {
  try {
    confirm_ends(state);
  } catch (...) {
    all_know(state);
    abandon_buffers(state, iteration);
    throw;
  }
  // Its peers may be in an iteration that it has not begun.
  if (own.kind == StatusKind::kAsk && !state.policy.compares_each_iteration()) {
    own.launches_later = 1;
  }
  return compare_or_end(state, iteration, own, patience);
}

void abort_iteration(EngineState& state) {
  const bool do_all_know = state.phase == Phase::kOver;
  const std::shared_ptr<Iteration> iteration = state.take_iteration();
  state.membership.mark_finished(iteration->preparation,
                                 /*may_be_repeated=*/false);
  state.observations.begun =
      std::max(state.observations.begun, iteration->number);
  ++state.observations.aborted;
  if (iteration->failure.empty()) {
    iteration->failure = "an exception ended backward";
  }
  // Peers have delivered, or will: they hear of it some iterations later.
  const bool is_alone = state.group->getSize() == 1;
  const bool is_late = !is_alone && may_defer_status(state, *iteration);
  RankStatus failed = {.kind = StatusKind::kFailed,
                       .cannot_continue = is_late ? 1 : 0,
                       .unit = next_unit(*iteration),
                       .launched = hash_of_launched(*iteration),
                       .text = status_text(iteration->failure)};
  std::string problem;
  if (!do_all_know && !is_alone && state.options.has_control_channel &&
      is_launched_by_peers(state, *iteration)) {
    if (!state.peers.can_continue()) {
      problem = "a collective has failed after it was launched";
    } else if (is_late) {
      problem = launch_substitutes(state, *iteration);
    } else {
      failed.launches_later = 1;
    }
  }
  if (!problem.empty()) state.peers.set_cannot_continue();
  state.policy.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
  if (do_all_know) return;
  try {
    if (is_late) {
      const RankStatus sent = send(state, *iteration, failed);
      state.peers.note_closed(
          absl::StrCat("This rank ", describe_status(sent), "."));
      return drain(state, *iteration);
    }
    const StatusComparison comparison =
        compare(state, *iteration, failed, state.options.failure_patience);
    if (!comparison.must_close) return;
    if (problem.empty()) problem = "another rank can't go on";
  } catch (...) {
    if (problem.empty()) problem = message_of(std::current_exception());
  }
  TORCH_WARN(state.options.name, ": while aborting ",
             describe(state.occasion(iteration->number)), ": ", problem,
             "\nThe process group was closed. Make a new one on all ranks.");
}

bool may_defer_status(const EngineState& state, const Iteration& iteration) {
  return state.runs_ahead() && iteration.chained.empty();
}

void end_unconfirmed(EngineState& state, std::shared_ptr<Iteration> iteration,
                     const RankStatus& own) {
  try {
    const RankStatus sent = send(state, *iteration, own);
    state.unconfirmed_ends.push_back(
        {.iteration = std::move(iteration), .sent = sent});
  } catch (...) {
    abandon_buffers(state, *iteration);
    ++state.observations.aborted;
    state.policy.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
    throw;
  }
}

void confirm_ends(EngineState& state) {
  while (!state.unconfirmed_ends.empty()) confirm_oldest_end(state);
}

// What an iteration teaches counts before the next. One that could not be
// delivered still has entries of the policy's, which may change.
void confirm_due_ends(EngineState& state) {
  const auto is_delivered = [](const UnconfirmedEnd& end) {
    return end.iteration->launches.empty();
  };
  const bool must_know_all =
      state.policy.is_learning() ||
      !std::ranges::all_of(state.unconfirmed_ends, is_delivered);
  const size_t may_be_open =
      must_know_all
          ? 0
          : static_cast<size_t>(state.options.max_unconfirmed_iterations);
  while (!state.unconfirmed_ends.empty() &&
         (state.unconfirmed_ends.size() > may_be_open ||
          state.peers.is_complete(state.unconfirmed_ends.front().sent))) {
    confirm_oldest_end(state);
  }
}

void call_between_iterations(EngineState& state, std::string_view doing,
                             const std::function<void()>& collective) {
  const WaitForPeers waiting(*state.observations.progress);
  try {
    collective();
  } catch (...) {
    state.close_group(message_of(std::current_exception()));
    throw_peer_error(absl::StrCat(state.options.name, ": ", std::string(doing),
                                  " on rank ", state.group->getRank()),
                     std::current_exception());
  }
}

void abandon_buffers(EngineState& state, Iteration& iteration) {
  iteration.chained.cancel(milliseconds(0));
  std::vector<Collective*> in_flight;
  for (const Launch& launch : iteration.launches) {
    if (is_pending(launch)) in_flight.push_back(launch.collective);
  }
  if (in_flight.empty()) return;
  keep_until_done(state.policy.abandon(in_flight), iteration);
  state.adopt_sequence();
}

void keep_until_done(std::shared_ptr<void> kept, const Iteration& iteration) {
  for (const Launch& launch : iteration.launches) {
    if (!launch.future) continue;
    launch.future->addCallback([kept](c10::ivalue::Future&) {},
                               /*uses_future=*/false);
  }
}

}  // namespace brigade
