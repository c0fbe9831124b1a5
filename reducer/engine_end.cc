// The end of an iteration: ranks agree, results are delivered or dropped. The
// end of an engine, which may have collectives in flight.

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_timeout.h"
#include "brigade/reducer/delivery.h"
#include "brigade/reducer/engine.h"
#include "brigade/reducer/hook_scope.h"
#include "brigade/reducer/launching.h"

namespace brigade {
namespace {

uint64_t hash_of_launched(const Iteration& iteration) {
  uint64_t hash = 0;
  for (size_t entry = 0; entry < iteration.sequence.size(); ++entry) {
    hash = c10::hash_combine(hash, iteration.order.is_launched(entry));
  }
  return hash;
}

// Keeps what a policy drops until the collectives in flight are complete.
void keep_until_done(const std::shared_ptr<void>& kept,
                     const Iteration& iteration) {
  for (const Launch& launch : iteration.launches) {
    if (!launch.future) continue;
    launch.future->addCallback([kept](c10::ivalue::Future&) {},
                               /*uses_future=*/false);
  }
}

}  // namespace

Engine::~Engine() {
  observations_.stall_watch = nullptr;  // asks this object

  // A backward that failed may tell of it a little late, on another thread.
  const std::weak_ptr<GradientHooks> callbacks = hooks_;
  hooks_ = nullptr;
  while (!callbacks.expired()) std::this_thread::yield();

  if (!iteration_) return;
  if (std::ranges::any_of(iteration_->launches, is_pending)) {
    keep_until_done(policy_.let_go(), *iteration_);
    return;
  }
  // A device may be busy with what is complete on the host: the current stream
  // is behind it before the memory goes.
  for (const Launch& launch : iteration_->launches) {
    if (launch.future) launch.future->wait();
  }
}

void Engine::failed(const std::exception_ptr& error) {
  if (phase_ == Phase::kOver) return;
  phase_ = Phase::kFailed;
  if (iteration_->failure.empty()) iteration_->failure = message_of(error);
}

void Engine::raise(const Failure& failure, int64_t iteration) {
  const Collective& collective = *failure.collective;
  if (!is_between(phase_)) failed(failure.error);
  // What an entry without a unit throws is no hook's.
  if (collective.unit() && policy_.hook_traits().throws_own_errors) {
    std::rethrow_exception(failure.error);
  }
  if (!is_peer_failure(failure)) rethrow_hook_error(failure);

  // A user's hook may use other groups, and be mistaken about the network.
  if (collective.fails_by_network_only()) {
    peers_.leave({.kind = StatusKind::kFailed,
                  .iteration = iteration,
                  .unit = static_cast<int64_t>(collective.unit().value_or(
                      num_units(policy_.sequence()))),
                  .text = status_text(message_of(failure.error))});
    if (!is_between(phase_)) phase_ = Phase::kOver;
  }
  // By iteration: peers may notice the same loss in another collective of it.
  const std::optional<LivenessProbe> probe =
      peers_.find_survivors(absl::StrCat(iteration));
  throw_peer_error(failure.where, failure.error,
                   probe.has_value() ? &*probe : nullptr);
}

// ---- Agreement

// A sequence is agreed on where it is made: later a peer may wait for something
// else than this rank's next forward or first gradient.
void Engine::agree_on_sequence(Iteration& iteration) {
  if (!peers_.is_connected()) connect_ranks();
  if (peers_.is_agreed(policy_.fingerprint())) return;
  end_together(iteration, agreement_.begin_status());
  peers_.set_agreed(policy_.fingerprint());
}

void Engine::end_together(Iteration& iteration, const RankStatus& own) {
  try {
    if (!peers_.is_connected()) connect_ranks();
    throw_if_apart(compare(iteration, own));
  } catch (...) {
    take_iteration();
    ++observations_.counts.aborted;
    policy_.on_iteration_over(Outcome::kAborted, iteration.is_shadow);
    throw;
  }
}

StatusComparison Engine::compare(
    Iteration& iteration, RankStatus own,
    std::optional<std::chrono::milliseconds> patience) {
  // Its peers may be in an iteration that it has not begun.
  if (own.kind == StatusKind::kAsk && !policy_.skips_unused_buckets()) {
    own.launches_later = 1;
  }
  StatusComparison found;
  try {
    agreement_.confirm_ends();
    const WaitForPeers waiting(*observations_.progress);
    found = agreement_.exchange(iteration, own, patience);
  } catch (...) {
    if (!is_between(phase_)) phase_ = Phase::kOver;
    abandon_buffers(iteration);
    throw;
  }
  if (found.status.ok()) return found;
  if (!is_between(phase_)) phase_ = Phase::kOver;
  for (const RankStatus& peer : found.by_rank) {
    observations_.counts.begun =
        std::max(observations_.counts.begun, peer.iteration);
  }
  if (found.must_close) {
    peers_.close(std::string(found.status.message()));
    abandon_buffers(iteration);
  } else {
    drop_results(iteration);
  }
  return found;
}

void Engine::abort_iteration() {
  const bool do_all_know = phase_ == Phase::kOver;
  const std::shared_ptr<Iteration> iteration = take_iteration();
  membership_.mark_finished(iteration->preparation,
                            /*may_be_repeated=*/false);
  observations_.counts.begun =
      std::max(observations_.counts.begun, iteration->number);
  ++observations_.counts.aborted;
  if (iteration->failure.empty()) {
    iteration->failure = "an exception ended backward";
  }
  // Peers have delivered, or will: they hear of it some iterations later.
  const bool is_alone = policy_.group()->getSize() == 1;
  const bool is_late = !is_alone && agreement_.may_defer_status(*iteration);
  RankStatus status = {.kind = StatusKind::kFailed,
                       .cannot_continue = is_late ? 1 : 0,
                       .unit = next_unit(*iteration),
                       .launched = hash_of_launched(*iteration),
                       .text = status_text(iteration->failure)};
  // Peers that have not begun it together wait for a status, not a collective.
  const bool is_launched_by_peers =
      !policy_.skips_unused_buckets() || iteration->has_begun_together;
  std::string problem;
  if (!do_all_know && !is_alone && policy_.options().control_channel &&
      is_launched_by_peers) {
    if (!peers_.can_continue()) {
      problem = "a collective has failed after it was launched";
    } else if (is_late) {
      problem = agreement_.launch_substitutes(*iteration);
    } else {
      status.launches_later = 1;
    }
  }
  if (!problem.empty()) peers_.set_cannot_continue();
  policy_.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
  if (do_all_know) return;
  try {
    if (is_late) {
      const RankStatus sent = agreement_.send(*iteration, status);
      peers_.note_closed(
          absl::StrCat("This rank ", describe_status(sent), "."));
      return drop_results(*iteration);
    }
    const StatusComparison found =
        compare(*iteration, status, policy_.options().failure_patience);
    if (!found.must_close) return;
    if (problem.empty()) problem = "another rank can't go on";
  } catch (...) {
    if (problem.empty()) problem = message_of(std::current_exception());
  }
  TORCH_WARN("Reducer: while aborting ", describe(iteration->occasion), ": ",
             problem,
             "\nThe process group was closed. Make a new one on all ranks.");
}

void Engine::drop_results(Iteration& iteration) {
  const WaitForPeers waiting(*observations_.progress);
  drain(iteration, group_timeout(*policy_.group()));
  abandon_buffers(iteration);
}

void Engine::abandon_buffers(Iteration& iteration) {
  iteration.chained.cancel(std::chrono::milliseconds(0));
  std::vector<Collective*> in_flight;
  for (const Launch& launch : iteration.launches) {
    if (is_pending(launch)) in_flight.push_back(launch.collective);
  }
  if (in_flight.empty()) return;
  keep_until_done(policy_.abandon(in_flight), iteration);
  adopt_sequence();
}

// ---- Delivery

void Engine::finish() {
  const std::shared_ptr<Iteration> iteration = take_iteration();
  membership_.mark_finished(iteration->preparation, iteration->creates_graph);
  const ObservedFinalize finalizing(observations_);
  const RankStatus end = {.kind = StatusKind::kEnd,
                          .text = status_text(policy_.hook_traits().name)};
  const bool is_deferred = agreement_.may_defer_status(*iteration);
  if (!is_deferred) end_together(*iteration, end);
  const HookScope scope(iteration->preparer);
  if (is_deferred) {
    deliver_unconfirmed(iteration, end);
  } else {
    deliver_together(*iteration);
  }
  observations_.timeline.finalized();
  policy_.on_iteration_over(Outcome::kDelivered, iteration->is_shadow);
  ++observations_.counts.reduced;
  if (!is_deferred) return;
  // They hold the results, whose memory is the policy's to let go of, and the
  // policy may have other entries before the end is confirmed.
  iteration->launches.clear();
  iteration->sequence = {};
}

// The result of a built-in hook is right on all ranks or on none, and is
// delivered as it comes. A user's hook may fail on one rank alone, so that
// ranks tell each other before anybody delivers.
void Engine::deliver_together(Iteration& iteration) {
  if (policy_.hook_traits().fails_by_network_only) {
    policy_.on_end_confirmed();
    return require_delivered(
        iteration, deliver_as_results_come(iteration, observations_.timeline));
  }
  const std::chrono::milliseconds timeout = group_timeout(*policy_.group());
  if (!iteration.chained.empty()) {
    // One that a rank has not launched would be waited for in vain.
    exchange_results(iteration, StatusKind::kChained,
                     launch_chained(iteration, peers_, timeout));
  }
  Results results;
  exchange_results(iteration, StatusKind::kArrived,
                   collect(iteration, policy_.hook_traits(),
                           observations_.timeline, timeout, results));
  policy_.on_end_confirmed();
  require_delivered(iteration, deliver(iteration, results));
}

// Peers may not have ended it yet: sends them `end` and does not wait for
// theirs. A user's hook's results come first; if they fail, peers are told of
// that instead, and waited for.
void Engine::deliver_unconfirmed(const std::shared_ptr<Iteration>& iteration,
                                 const RankStatus& end) {
  const HookTraits& hook = policy_.hook_traits();
  Results results;
  if (!hook.fails_by_network_only) {
    if (const auto failure =
            collect(*iteration, hook, observations_.timeline,
                    group_timeout(*policy_.group()), results)) {
      tell_of_failure(*iteration, *failure);
    }
  }
  try {
    agreement_.defer(iteration, end);
  } catch (...) {
    abandon_buffers(*iteration);
    ++observations_.counts.aborted;
    policy_.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
    throw;
  }
  require_delivered(*iteration, hook.fails_by_network_only
                                    ? deliver_as_results_come(
                                          *iteration, observations_.timeline)
                                    : deliver(*iteration, results));
}

// Throws on all ranks if one has failed.
void Engine::exchange_results(Iteration& iteration, StatusKind kind,
                              const std::optional<Failure>& failure) {
  if (failure) tell_of_failure(iteration, *failure);
  end_together(iteration, {.kind = kind});
}

// Throws it when peers know, or can't be told.
void Engine::tell_of_failure(Iteration& iteration, const Failure& failure) {
  try {
    compare(iteration,
            {.kind = StatusKind::kFailed,
             .unit = static_cast<int64_t>(*failure.collective->unit()),
             .text = status_text(message_of(failure.error))});
  } catch (...) {
    // This rank has an error of its own.
  }
  ++observations_.counts.aborted;
  policy_.on_iteration_over(Outcome::kAborted, iteration.is_shadow);
  if (policy_.hook_traits().throws_own_errors) {
    std::rethrow_exception(failure.error);
  }
  rethrow_hook_error(failure);
}

void Engine::require_delivered(const Iteration& iteration,
                               const std::optional<Failure>& failure) {
  if (!failure) return;
  ++observations_.counts.aborted;
  policy_.on_iteration_over(Outcome::kDeliveryFailed, iteration.is_shadow);
  raise(*failure, iteration.number);
}

}  // namespace brigade
