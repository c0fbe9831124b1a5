// Where the ranks of an iteration meet, and what becomes of it when one of them
// has failed or is somewhere else.

#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/close_group.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/peer_error.h"
#include "brigade/comm/timed_wait.h"
#include "brigade/engine/hook_scope.h"
#include "brigade/reducer/reducer.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;

}  // namespace

void Reducer::connect() {
  statuses_.connect();
  observations_.watch_stalls(group_, statuses_.store_prefix(),
                             [this] { return describe_progress(); });
}

// Peers are waited for where lengths could clash: before the first bucket of a
// plan, and before a map whose sum decides what is launched. A plan is agreed
// on where it is made, since afterwards a peer may wait for something else than
// this rank's next forward or first gradient.
void Reducer::agree_on_plan(IterationState& iteration) {
  if (!statuses_.is_connected()) connect();
  if (statuses_.is_agreed(bound_.fingerprint)) return;
  end_together(iteration, begin_status());
  statuses_.set_agreed(bound_.fingerprint);
  leave_sync_point();
}

void Reducer::begin_with_peers() {
  throw_if_apart(compare(*iteration_, begin_status()));
}

RankStatus Reducer::begin_status() const {
  std::string plan = absl::StrCat(bound_.plan.num_buckets(), " buckets, ",
                                  table_.size(), " parameters");
  if (!hook_.name.empty()) {
    absl::StrAppend(&plan, ", comm hook ", hook_.name);
  }
  return {.kind = StatusKind::kBegin, .text = status_text(plan)};
}

// Throws on all ranks alike unless all are in the same place. The iteration is
// given up then.
void Reducer::end_together(IterationState& iteration, const RankStatus& own) {
  try {
    if (!statuses_.is_connected()) connect();
    throw_if_apart(compare(iteration, own));
  } catch (...) {
    take_iteration();
    ++observations_.aborted;
    forget_observations();
    throw;
  }
}

// Tells peers where this rank is, and brings all to the same place if they are
// not. Errors: PeerError if peers do not answer.
StatusComparison Reducer::compare(
    IterationState& iteration, RankStatus own,
    std::optional<std::chrono::milliseconds> patience) {
  own.iteration = iteration.iteration;
  own.fingerprint = bound_.fingerprint;
  const WaitForPeers waiting(*observations_.progress);
  std::optional<StatusComparison> comparison;
  try {
    comparison = statuses_.exchange(own, patience);
  } catch (const c10::DistBackendError& error) {
    exchange_failed(/*have_met=*/false);
    const std::string where = describe_awaited(iteration);
    abort_group(iteration);
    throw_peer_error(absl::StrCat("Reducer: ", where),
                     std::make_exception_ptr(
                         std::runtime_error(error.what_without_backtrace())));
  } catch (...) {
    exchange_failed(/*have_met=*/false);
    abandon_buffers(iteration);
    throw;
  }
  if (comparison->status.ok()) {
    if (is_between(phase_)) phase_ = Phase::kAtSyncPoint;
  } else {
    exchange_failed(/*have_met=*/false);
    resync(iteration, *comparison);
  }
  return *std::move(comparison);
}

// Ranks differ, or one has failed. If an iteration is under way, it is over.
void Reducer::exchange_failed(bool have_met) {
  if (is_between(phase_)) {
    phase_ = have_met ? Phase::kAtSyncPoint : Phase::kIdle;
  } else {
    phase_ = have_met ? Phase::kResynced : Phase::kLost;
  }
}

void Reducer::resync(IterationState& iteration, StatusComparison& comparison) {
  observations_.begun = std::max(observations_.begun, comparison.iteration);
  if (comparison.deficit.ok()) {
    const HookScope scope(iteration.preparer);
    try {
      launch_deficit(iteration, *comparison.deficit);
    } catch (...) {
      comparison.deficit = absl::UnavailableError(
          absl::StrCat("this rank could not be brought in step: ",
                       words_of_exception(std::current_exception())));
    }
  }
  if (!comparison.deficit.ok()) return abort_group(iteration);
  drain(iteration);
  statuses_.met();
  exchange_failed(/*have_met=*/true);
}

// Launches what the other ranks have launched of an iteration that is given up,
// and discards the results.
void Reducer::launch_deficit(IterationState& iteration, int64_t num_launches) {
  for (Collective* const next :
       iteration.sequence.subspan(iteration.order.num_launched())) {
    if (num_launches == 0) return;
    if (next->is_left_out()) continue;
    launch_substitute(iteration, *next);
    --num_launches;
  }
  TORCH_CHECK(num_launches == 0, num_launches,
              " launches are owed beyond those of the plan");
}

void Reducer::launch_substitute(IterationState& iteration,
                                Collective& collective) {
  const ChainedCollectives::Scope chaining(iteration.chained);
  const auto future = collective.launch_substitute();
  if (collective.bucket()) ++observations_.buckets_launched;
  if (!iteration.chained.empty()) {
    // Nobody launches the second ones of an iteration that is given up.
    iteration.chained.cancel(group_timeout(*group_));
  } else if (future) {
    future->waitAndThrow();
  }
}

void Reducer::on_backward_abandoned(int64_t preparation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (iteration_ && iteration_->preparation.number == preparation)
    abort_iteration();
}

// Does not throw: destructors of autograd's call it, and an error is on its way
// already.
void Reducer::abort_iteration() {
  const bool is_known = phase_ == Phase::kLost || phase_ == Phase::kResynced;
  const std::shared_ptr<IterationState> iteration = take_iteration();
  membership_.mark_finished(iteration->preparation, /*may_be_repeated=*/false);
  ++observations_.aborted;
  forget_observations();
  if (is_known) return;
  if (iteration->failure.empty()) {
    iteration->failure = "an exception ended backward";
  }
  try {
    const StatusComparison comparison =
        compare(*iteration,
                {.kind = StatusKind::kFailed,
                 .unit = num_buckets(iteration->launches),
                 .text = status_text(iteration->failure)},
                options_.failure_patience);
    if (comparison.deficit.ok()) return;
    TORCH_WARN("Reducer: while giving up ",
               describe(occasion(iteration->iteration)), ": ",
               comparison.deficit.status().message());
  } catch (...) {
    TORCH_WARN("Reducer: while giving up ",
               describe(occasion(iteration->iteration)), ": ",
               words_of_exception(std::current_exception()));
  }
}

// Of an iteration that did not end well, on no rank.
void Reducer::forget_observations() {
  if (graph_.used) graph_.used->clear_marks();
  if (graph_.hook_counts) graph_.hook_counts->abort();
}

// So that nothing writes into a bucket behind the user's back.
void Reducer::drain(IterationState& iteration) {
  const WaitForPeers waiting(*observations_.progress);
  const milliseconds timeout = group_timeout(*group_);
  iteration.chained.cancel(timeout);
  for (Launch& launch : iteration.launches) {
    if (!launch.future || launch.is_overdue) continue;
    try {
      launch.is_overdue = !wait_for(*launch.future, timeout);
      if (launch.is_overdue) continue;
      launch.future->wait();
      const c10::Device device = launch.collective->device();
      // Waiting orders streams only, and not the ones that the user works on.
      if (!device.is_cpu()) current_stream(device).synchronize();
    } catch (...) {
      TORCH_WARN("Reducer: while waiting for ",
                 describe_place(*launch.collective, iteration.iteration), ": ",
                 words_of_exception(std::current_exception()));
    }
  }
  abandon_buffers(iteration);
}

// Peers that wait for this rank's next status get these words.
void Reducer::abort_group(const RankStatus& last_words) {
  statuses_.tell_of_loss(last_words);
  statuses_.lose_group();
  close_group(*group_);
}

void Reducer::abandon_group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  abort_group({.kind = StatusKind::kFailed,
               .iteration = observations_.begun,
               .text = status_text("another collective failed")});
}

void Reducer::abort_group(IterationState& iteration) {
  statuses_.lose_group();
  close_group(*group_);
  abandon_buffers(iteration);
}

bool Reducer::can_continue() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !statuses_.has_lost_group();
}

// Collectives that may never end keep their buckets; gradients go to new ones.
// What they held is lost.
void Reducer::abandon_buffers(IterationState& iteration) {
  iteration.chained.cancel(milliseconds(0));
  if (std::none_of(iteration.launches.begin(), iteration.launches.end(),
                   is_pending)) {
    return;
  }
  for (const Launch& launch : iteration.launches) {
    const std::optional<size_t> bucket = launch.collective->bucket();
    if (!bucket || !is_pending(launch)) continue;
    const std::vector<size_t>& members = bound_.plan.buckets()[*bucket];
    for (size_t r = 0; r < table_.num_replicas(); ++r) {
      for (size_t slot = 0; slot < members.size(); ++slot) {
        at::Tensor& gradient =
            table_[VariableIndex{.replica = r, .parameter = members[slot]}]
                .mutable_grad();
        if (gradient.defined() &&
            bound_.buckets[*bucket].is_view_in(r, slot, gradient)) {
          gradient = at::zeros_like(gradient);
        }
      }
    }
  }
  BoundPlan fresh = bind(bound_.plan, hook_);  // may throw
  BoundPlan old = std::move(bound_);
  adopt(std::move(fresh));
  keep_until_done(std::move(old), iteration.launches);
}

// The first that has not arrived, or the last one launched.
std::string Reducer::describe_awaited(const IterationState& iteration) const {
  const auto& launches = iteration.launches;
  if (launches.empty()) return describe(occasion(iteration.iteration));
  auto awaited = std::ranges::find_if(launches, is_pending);
  if (awaited == launches.end()) --awaited;
  return describe_place(*awaited->collective, iteration.iteration);
}

// "bucket 1 of 3 (parameter 4) in iteration 17 on rank 2".
std::string Reducer::describe_place(const Collective& collective,
                                    int64_t iteration) const {
  return absl::StrCat(collective.describe(), " in ",
                      describe(occasion(iteration)));
}

// Of the exception that is being handled.
Reducer::Failure Reducer::failure_of(const IterationState& iteration,
                                     ErrorSource source,
                                     Collective& collective) const {
  return {.error = std::current_exception(),
          .source = source,
          .collective = &collective,
          .where = absl::StrCat(
              "Reducer: ", describe_place(collective, iteration.iteration))};
}

// REQUIRES: its collective is there.
void Reducer::raise(const Failure& failure, int64_t iteration) {
  const Collective& collective = *failure.collective;
  if (!is_between(phase_)) failed(failure.error);
  // What the map throws is no hook's.
  if (collective.bucket() && hook_.throws_own_errors) {
    std::rethrow_exception(failure.error);
  }
  if (!is_peer_failure(failure.error, failure.source,
                       collective.fails_by_network_only())) {
    rethrow_hook_error(failure.error, failure.where);
  }

  // A user's hook may use other groups, and be mistaken about the network.
  if (collective.fails_by_network_only()) {
    abort_group({.kind = StatusKind::kFailed,
                 .iteration = iteration,
                 .unit = static_cast<int64_t>(
                     collective.bucket().value_or(bound_.buckets.size())),
                 .text = status_text(words_of_exception(failure.error))});
    if (!is_between(phase_)) phase_ = Phase::kLost;
  }
  // By iteration: peers may notice the same loss in another collective of it.
  const std::optional<LivenessProbe> probe =
      statuses_.find_survivors(absl::StrCat(iteration));
  throw_peer_error(failure.where, failure.error,
                   probe.has_value() ? &*probe : nullptr);
}

}  // namespace brigade
