#include "brigade/reducer/iteration_end.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <ranges>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/streams/streams.h"

namespace brigade {
namespace {

// Time in which peers must receive a failure. Then the group is closed, which
// ends collectives that block a peer.
constexpr std::chrono::seconds kFailureTimeout(5);

bool has_ended(const RankStatus& rank_status) {
  return rank_status.kind == StatusKind::kEnd;
}

bool is_over_for(const RankStatus& rank_status) {
  return has_ended(rank_status) || rank_status.kind == StatusKind::kFailed;
}

bool launches_later(const RankStatus& rank_status) {
  return rank_status.launches_later != 0;
}

std::string describe_awaited(const Iteration& iteration) {
  const auto& launches = iteration.launches;
  if (launches.empty()) return describe(iteration.id);
  auto awaited = std::ranges::find_if(launches, is_pending);
  if (awaited == launches.end()) --awaited;
  return describe_place(*awaited->collective, iteration.id);
}

uint64_t hash_of_launched(const Iteration& iteration) {
  uint64_t hash = 0;
  for (size_t entry = 0; entry < iteration.sequence.size(); ++entry) {
    hash = c10::hash_combine(hash, iteration.order.is_launched(entry));
  }
  return hash;
}

void keep_until_done(const std::shared_ptr<void>& kept,
                     const Iteration& iteration) {
  for (const Launch& launch : iteration.launches) {
    if (!launch.future) continue;
    launch.future->addCallback([kept](c10::ivalue::Future&) {},
                               /*uses_future=*/false);
  }
}

// ---- Results

// The used-parameter map has no unit: its readers wait for it.
auto with_unit(Iteration& iteration) {
  return iteration.launches | std::views::filter([](const Launch& launch) {
           return launch.collective->unit().has_value();
         });
}

// REQUIRES: the future, if any, is complete.
at::Tensor result_of(const Launch& launch) {
  if (!launch.future) return {};
  return launch.collective->result_of(launch.future->value());
}

// Returns the failure of a delivery with the current exception. Deliveries wait
// for the used-parameter map: if that failed, the failure is the map's.
Failure failed_delivery(const Iteration& iteration, Collective& collective) {
  for (const Launch& launch : iteration.launches) {
    if (!launch.collective->unit() && launch.future &&
        launch.future->completed() && launch.future->hasError()) {
      return failure_of(iteration.id, ErrorSource::kFuture, *launch.collective);
    }
  }
  return failure_of(iteration.id, ErrorSource::kDelivery, collective);
}

// Waits for all results, also after an error, so that nothing writes to a
// bucket later. Calls `await` before each wait, and `take` with each result up
// to the first error. `delivers`: `take` delivers the result.
template <typename Await, typename Take>
std::optional<Failure> take_results(Iteration& iteration,
                                    TimelineRecorder& timeline, bool delivers,
                                    const Await& await, const Take& take) {
  std::optional<Failure> failure;
  for (Launch& launch : with_unit(iteration)) {
    bool is_complete = false;
    try {
      if (launch.future) {
        await(launch);
        launch.future->waitAndThrow();
        timeline.waited_for(*launch.collective->unit());
      }
      is_complete = true;
      if (!failure) take(*launch.collective, result_of(launch));
    } catch (...) {
      if (failure) continue;
      failure = is_complete && delivers
                    ? failed_delivery(iteration, *launch.collective)
                    : failure_of(iteration.id, ErrorSource::kFuture,
                                 *launch.collective);
    }
  }
  return failure;
}

std::optional<Failure> deliver_as_completed(Iteration& iteration,
                                            TimelineRecorder& timeline) {
  return take_results(
      iteration, timeline, /*delivers=*/true, [](Launch&) {},
      [&](Collective& collective, const at::Tensor& result) {
        if (!iteration.is_shadow) collective.deliver(result);
      });
}

using Results = std::vector<std::pair<Collective*, at::Tensor>>;

// Waits for the results of a user's hook, `timeout` each; no longer after the
// first timeout.
std::optional<Failure> collect(Iteration& iteration, const HookTraits& hook,
                               TimelineRecorder& timeline,
                               std::chrono::milliseconds timeout,
                               Results& results) {
  auto left = timeout;
  auto failure = take_results(
      iteration, timeline, /*delivers=*/false,
      [&](Launch& launch) {
        launch.has_timed_out = !wait_for(*launch.future, left);
        if (launch.has_timed_out) left = std::chrono::milliseconds(0);
        TORCH_CHECK(!launch.has_timed_out, "the future of ", describe(hook),
                    " was not complete within ", timeout.count() / 1000.0,
                    " s, the group's timeout. The group was closed.\n"
                    "Complete it on every rank, launch no collectives in its "
                    "continuations (then_collective() does), and make a new "
                    "group.");
      },
      [&](Collective& collective, at::Tensor result) {
        results.emplace_back(&collective, std::move(result));
      });
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

// Waits for all launches, `timeout` each, so that none writes to the user's
// memory later.
void drain(Iteration& iteration, std::chrono::milliseconds timeout) {
  iteration.chained.cancel(timeout);
  for (Launch& launch : iteration.launches) {
    if (!launch.future || launch.has_timed_out) continue;
    try {
      launch.has_timed_out = !wait_for(*launch.future, timeout);
      if (launch.has_timed_out) continue;
      launch.future->wait();
      const c10::Device device = launch.collective->device();
      // wait() makes this thread's stream wait, but not the user's streams.
      if (!device.is_cpu()) current_stream(device).synchronize();
    } catch (...) {
      TORCH_WARN("Reducer: while waiting for ",
                 describe_place(*launch.collective, iteration.id), ": ",
                 message_of(std::current_exception()));
    }
  }
}

}  // namespace

void IterationEnd::adopt_sequence(Iteration* iteration) {
  const std::span<Collective* const> sequence = policy_.sequence();
  if (iteration != nullptr) {
    iteration->sequence = sequence;
    if (!iteration->has_begun()) iteration->order = launch_order_of(sequence);
  }
  std::vector<c10::Device> devices;
  devices.reserve(sequence.size());
  for (const Collective* collective : sequence) {
    if (collective->unit()) devices.push_back(collective->device());
  }
  observations_.bind(std::move(devices), policy_.table().num_variables());
}

void IterationEnd::release_in_flight(const Iteration& iteration) {
  if (std::ranges::any_of(iteration.launches, is_pending)) {
    keep_until_done(policy_.let_go(), iteration);
    return;
  }
  // A completed future's work may still run on the device: the current stream
  // waits for it before the memory is freed.
  for (const Launch& launch : iteration.launches) {
    if (launch.future) launch.future->wait();
  }
}

void IterationEnd::raise(Iteration& iteration, const Failure& failure) {
  const Collective& collective = *failure.collective;
  iteration.fail(failure.error);
  // The used-parameter map has no hook.
  if (collective.unit() && policy_.hook_traits().throws_own_errors) {
    std::rethrow_exception(failure.error);
  }
  if (!is_peer_failure(failure)) rethrow_hook_error(failure);

  // A user's hook may use other groups: its network error may not be of this
  // one.
  if (collective.fails_by_network_only()) {
    peers_.send_and_close(
        {.kind = StatusKind::kFailed,
         .iteration = iteration.number,
         .unit = static_cast<int64_t>(
             collective.unit().value_or(num_units(policy_.sequence()))),
         .text = status_text(message_of(failure.error))});
    iteration.phase = Phase::kOver;
  }
  // Keyed by iteration: peers may notice the same loss in another collective.
  const std::optional<LivenessProbe> probe =
      peers_.find_survivors(absl::StrCat(iteration.number));
  throw_peer_error(failure.where, failure.error,
                   probe.has_value() ? &*probe : nullptr);
}

// ---- Agreement

void IterationEnd::compare_begin(Iteration& iteration) {
  throw_unless_agreed(compare(iteration, begin_status()));
  iteration.has_compared_begin = true;
}

RankStatus IterationEnd::begin_status() const {
  std::string words =
      absl::StrCat(counted(policy_.plan().num_buckets(), "bucket"), ", ",
                   counted(policy_.table().size(), "parameter"));
  int32_t hook_at = 0;
  if (const std::string& hook = policy_.hook_traits().name; !hook.empty()) {
    absl::StrAppend(&words, ", comm hook ");
    hook_at = static_cast<int32_t>(words.size());
    words += hook;
  }
  return {.kind = StatusKind::kBegin,
          .hook_at = hook_at,
          .text = status_text(words)};
}

void IterationEnd::agree(Iteration& iteration, const RankStatus& own) {
  try {
    throw_unless_agreed(compare(iteration, own));
  } catch (...) {
    record(iteration, Outcome::kAborted);
    throw;
  }
}

void IterationEnd::record(const Iteration& iteration, Outcome outcome) {
  auto& counts = observations_.counts;
  ++(outcome == Outcome::kDelivered ? counts.reduced : counts.aborted);
  if (outcome != Outcome::kAborted) ++num_reduced_;
  policy_.on_iteration_over(outcome, iteration.is_shadow);
}

StatusComparison IterationEnd::compare(Iteration& iteration, RankStatus own,
                                       Timeout timeout) {
  // Peers may be in an iteration that this rank has not begun.
  if (own.kind == StatusKind::kAsk && !policy_.skips_unused_buckets()) {
    own.launches_later = 1;
  }
  StatusComparison found;
  try {
    confirm_ends();
    const WaitForPeers waiting(*observations_.progress);
    found = exchange(iteration, own, timeout);
  } catch (...) {
    iteration.phase = Phase::kOver;
    abandon_buffers(iteration);
    throw;
  }
  if (found.status.ok()) return found;
  iteration.phase = Phase::kOver;
  int64_t& begun = observations_.counts.begun;
  for (const RankStatus& peer : found.by_rank) {
    begun = std::max(begun, peer.iteration);
  }
  if (found.must_close) {
    peers_.close(std::string(found.status.message()));
    abandon_buffers(iteration);
  } else {
    drop_results(iteration);
  }
  return found;
}

RankStatus IterationEnd::send(const Iteration& iteration, RankStatus own) {
  own.iteration = iteration.number;
  const uint64_t of_sequence = policy_.fingerprint();
  own.fingerprint = own.fingerprint == 0
                        ? of_sequence
                        : c10::hash_combine(of_sequence, own.fingerprint);
  return peers_.send(own, /*ends_iteration=*/is_over_for(own));
}

StatusComparison IterationEnd::exchange(Iteration& iteration,
                                        const RankStatus& own,
                                        Timeout timeout) {
  try {
    StatusComparison found = peers_.await(send(iteration, own), timeout);
    // Peers have delivered buckets that this rank has not launched.
    found.must_close |= !found.status.ok() && runs_ahead() && !has_ended(own) &&
                        std::ranges::any_of(found.by_rank, has_ended);
    catch_up(iteration, own, found, timeout);
    return found;
  } catch (const c10::DistBackendError& error) {
    const std::string where = describe_awaited(iteration);
    const std::string text = error.what_without_backtrace();
    peers_.close(text);
    throw_peer_error("Reducer", std::make_exception_ptr(std::runtime_error(
                                    absl::StrCat(text, "\nPending: ", where))));
  }
}

std::string IterationEnd::launch_substitutes(Iteration& iteration) {
  try {
    launch_rest(iteration, peers_, observations_);
    return "";
  } catch (...) {
    return message_of(std::current_exception());
  }
}

// Launches zeros for the entries that this rank has not launched, and exchanges
// whether that succeeded. With skip_all_reduce_unused_parameters only ranks
// that have begun the iteration launch zeros.
void IterationEnd::catch_up(Iteration& iteration, const RankStatus& own,
                            StatusComparison& found, Timeout timeout) {
  if (found.status.ok() ||
      !std::ranges::any_of(found.by_rank, launches_later)) {
    return;
  }
  if (found.must_close) {
    // On devices the streams of peers that have ended wait for these.
    if (launches_later(own) && runs_ahead()) launch_substitutes(iteration);
    return;
  }
  if (!policy_.skips_unused_buckets() &&
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
    const std::string problem = launch_substitutes(iteration);
    if (!problem.empty()) peers_.set_cannot_continue();
    caught_up.text = status_text(problem);
  }
  found.must_close =
      peers_.await(send(iteration, caught_up), timeout).must_close;
}

void IterationEnd::abort(Iteration& iteration) {
  int64_t& begun = observations_.counts.begun;
  begun = std::max(begun, iteration.number);
  if (iteration.phase == Phase::kOver) {
    return record(iteration, Outcome::kAborted);
  }
  if (iteration.failure.empty()) {
    iteration.failure = "its backward raised an exception; see its log";
  }
  const bool is_alone = policy_.group()->getSize() == 1;
  // On devices peers deliver this iteration, and receive the status later.
  const bool is_late = !is_alone && may_defer_status(iteration);
  RankStatus status = {.kind = StatusKind::kFailed,
                       .cannot_continue = is_late ? 1 : 0,
                       .unit = next_unit(iteration),
                       .launched = hash_of_launched(iteration),
                       .text = status_text(iteration.failure)};
  // Otherwise peers are still in compare_begin(), and have launched nothing.
  const bool is_launched_by_peers =
      !policy_.skips_unused_buckets() || iteration.has_compared_begin;
  std::string problem;
  if (!is_alone && is_launched_by_peers) {
    if (!peers_.can_continue()) {
      problem = "a collective has failed after it was launched";
    } else if (is_late) {
      problem = launch_substitutes(iteration);
    } else {
      status.launches_later = 1;
    }
  }
  if (!problem.empty()) peers_.set_cannot_continue();
  record(iteration, Outcome::kAborted);
  try {
    if (is_late) {
      const RankStatus sent = send(iteration, status);
      peers_.note_closed(
          absl::StrCat("This rank ", describe_status(sent), "."));
      return drop_results(iteration);
    }
    const StatusComparison found = compare(iteration, status, kFailureTimeout);
    // This rank's own error follows.
    if (!found.must_close || problem.empty()) return;
  } catch (...) {
    if (problem.empty()) problem = message_of(std::current_exception());
  }
  TORCH_WARN("Reducer: the error in ", describe(iteration.id),
             " closed the process group: ", problem,
             "\nMake a new group on all ranks.");
}

void IterationEnd::drop_results(Iteration& iteration) {
  const WaitForPeers waiting(*observations_.progress);
  drain(iteration, group_timeout(*policy_.group()));
  abandon_buffers(iteration);
}

void IterationEnd::abandon_buffers(Iteration& iteration) {
  iteration.chained.cancel(std::chrono::milliseconds(0));
  if (iteration.launches.empty()) return;
  policy_.drop_views();
  if (std::ranges::none_of(iteration.launches, is_pending)) return;
  keep_until_done(policy_.abandon(), iteration);
  adopt_sequence(&iteration);
}

// ---- Delivery

void IterationEnd::finish(const std::shared_ptr<Iteration>& iteration) {
  const WaitForPeers waiting(*observations_.progress);
  const ProfilerRange range(observations_.finalize_name);
  observations_.timeline.backward_ends();
  const RankStatus end = {.kind = StatusKind::kEnd,
                          .text = status_text(policy_.hook_traits().name)};
  const bool is_deferred = may_defer_status(*iteration);
  if (!is_deferred) agree(*iteration, end);
  const HookScope scope(iteration->preparer);
  if (is_deferred) {
    deliver_unconfirmed(iteration, end);
  } else {
    deliver_together(*iteration);
  }
  observations_.timeline.finalized();
  record(*iteration, Outcome::kDelivered);
  if (!is_deferred) return;
  // The policy may replace its entries before the end is confirmed.
  iteration->launches.clear();
  iteration->sequence = {};
}

// A built-in hook succeeds on all ranks or on none, so each result is delivered
// when it is complete. A user's hook may fail on one rank alone, so ranks
// exchange statuses between the last result and the first delivery.
void IterationEnd::deliver_together(Iteration& iteration) {
  if (policy_.hook_traits().fails_by_network_only) {
    policy_.on_end_confirmed();
    return require_delivered(
        iteration, deliver_as_completed(iteration, observations_.timeline));
  }
  const std::chrono::milliseconds timeout = group_timeout(*policy_.group());
  if (!iteration.chained.empty()) {
    // Nobody may wait for one that a rank could not launch.
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

// Sends `end` and delivers, without waiting for the peers' statuses. A user's
// hook may fail on one rank alone, so its results are awaited first.
void IterationEnd::deliver_unconfirmed(
    const std::shared_ptr<Iteration>& iteration, const RankStatus& end) {
  const HookTraits& hook = policy_.hook_traits();
  Results results;
  if (!hook.fails_by_network_only) {
    if (const auto failure =
            collect(*iteration, hook, observations_.timeline,
                    group_timeout(*policy_.group()), results)) {
      send_and_throw(*iteration, *failure);
    }
  }
  try {
    const RankStatus sent = send(*iteration, end);
    unconfirmed_ends_.push_back({.iteration = iteration, .sent = sent});
  } catch (...) {
    abandon_buffers(*iteration);
    record(*iteration, Outcome::kAborted);
    throw;
  }
  require_delivered(
      *iteration, hook.fails_by_network_only
                      ? deliver_as_completed(*iteration, observations_.timeline)
                      : deliver(*iteration, results));
}

// Throws on all ranks if one passes a failure.
void IterationEnd::exchange_results(Iteration& iteration, StatusKind kind,
                                    const std::optional<Failure>& failure) {
  if (failure) send_and_throw(iteration, *failure);
  agree(iteration, {.kind = kind});
}

void IterationEnd::send_and_throw(Iteration& iteration,
                                  const Failure& failure) {
  if (std::ranges::any_of(iteration.launches, &Launch::has_timed_out)) {
    peers_.set_cannot_continue();  // its collectives may be out of order
  }
  try {
    compare(iteration,
            {.kind = StatusKind::kFailed,
             .unit = static_cast<int64_t>(*failure.collective->unit()),
             .text = status_text(message_of(failure.error))});
  } catch (...) {
    // This rank throws its own failure.
  }
  record(iteration, Outcome::kAborted);
  if (policy_.hook_traits().throws_own_errors) {
    std::rethrow_exception(failure.error);
  }
  rethrow_hook_error(failure);
}

void IterationEnd::require_delivered(Iteration& iteration,
                                     const std::optional<Failure>& failure) {
  if (!failure) return;
  record(iteration, Outcome::kDeliveryFailed);
  raise(iteration, *failure);
}

// ---- Unconfirmed ends

bool IterationEnd::runs_ahead() const {
  return std::ranges::none_of(policy_.sequence(), [](const Collective* entry) {
    return entry->device().is_cpu();
  });
}

void IterationEnd::confirm_oldest_end() {
  const UnconfirmedEnd end = std::move(unconfirmed_ends_.front());
  unconfirmed_ends_.pop_front();
  const size_t num_later = unconfirmed_ends_.size();
  try {
    StatusComparison found = peers_.await(end.sent);
    if (found.status.ok()) return policy_.on_end_confirmed();
    found.must_close = true;
    peers_.close(std::string(found.status.message()));
    throw_unless_agreed(
        found, absl::StrCat("Reducer: iteration ", end.iteration->number,
                            num_later == 0 ? ""
                                           : absl::StrCat(", and ", num_later,
                                                          " after it"),
                            ", whose results were delivered before the failure "
                            "was known.\nLoad "
                            "a checkpoint on all ranks"));
  } catch (...) {
    if (!peers_.is_closed()) {
      peers_.close(message_of(std::current_exception()));
    }
    late_failure_ = message_of(std::current_exception());
    unconfirmed_ends_.clear();
    policy_.on_end_refuted();
    throw;
  }
}

void IterationEnd::confirm_ends() {
  while (!unconfirmed_ends_.empty()) confirm_oldest_end();
}

bool IterationEnd::confirm_ends_within(std::chrono::milliseconds timeout) {
  const WaitForPeers waiting(*observations_.progress);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!unconfirmed_ends_.empty()) {
    if (peers_.is_complete(unconfirmed_ends_.front().sent)) {
      confirm_oldest_end();
    } else if (std::chrono::steady_clock::now() > deadline) {
      return false;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

// While the policy learns from iterations, the next one waits for all statuses.
// So does one after a failed delivery, whose entries the policy may replace.
void IterationEnd::confirm_due_ends() {
  const auto is_delivered = [](const UnconfirmedEnd& end) {
    return end.iteration->launches.empty();
  };
  const bool must_confirm_all =
      policy_.is_learning() ||
      !std::ranges::all_of(unconfirmed_ends_, is_delivered);
  const size_t max_unconfirmed =
      must_confirm_all
          ? 0
          : static_cast<size_t>(policy_.options().max_unconfirmed_iterations);
  while (!unconfirmed_ends_.empty() &&
         (unconfirmed_ends_.size() > max_unconfirmed ||
          peers_.is_complete(unconfirmed_ends_.front().sent))) {
    confirm_oldest_end();
  }
}

}  // namespace brigade
