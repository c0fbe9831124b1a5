// The end of an iteration: results are waited for and become gradients.

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/comm/timed_wait.h"
#include "brigade/comm/wait_awake.h"
#include "brigade/engine/hook_scope.h"
#include "brigade/reducer/reducer.h"

namespace brigade {
namespace {

std::string describe(const HookTraits& hook) {
  return hook.name.empty() ? "the comm hook"
                           : absl::StrCat("comm hook ", hook.name);
}

// Undefined: nothing travelled, or nothing is to be handed over.
at::Tensor result_of(const Launch& launch) {
  if (!launch.future) return {};
  return launch.collective->result_of(launch.future->value());
}

}  // namespace

// Waits for every future, also after an error: nothing may write into a bucket
// behind the user's back.
//
// What a built-in hook's future holds is right on all ranks or on none, and is
// delivered as it comes. A user's hook may fail on one rank alone, so that
// ranks tell each other before anybody delivers.
void Reducer::finalize() {
  const bool is_shadow = phase_ == Phase::kShadowing;
  const std::shared_ptr<IterationState> iteration = take_iteration();
  membership_.mark_finished(iteration->preparation, iteration->creates_graph);
  const ObservedFinalize finalizing(observations_);
  end_together(*iteration,
               {.kind = StatusKind::kEnd, .text = status_text(hook_.name)});
  graph_.ready_order.observe();
  const HookScope scope(iteration->preparer);

  if (hook_.fails_by_network_only) {
    deliver_as_results_come(*iteration, is_shadow);
  } else {
    deliver_what_all_ranks_have(*iteration, is_shadow);
  }
  if (graph_.used) graph_.used->clear_marks();
  observations_.timeline.finalized();
  iteration->context_gradients.write_back();
  if (options_.lazy_bucket_allocation) release_memory();
  ++observations_.reduced;
}

void Reducer::deliver_as_results_come(IterationState& iteration,
                                      bool is_shadow) {
  if (graph_.hook_counts) graph_.hook_counts->confirm();
  std::optional<Failure> failure;
  const auto awake_until = std::chrono::steady_clock::now() + kMaxTimeAwake;
  for (const Launch& launch : iteration.launches) {
    const std::optional<size_t> bucket = launch.collective->bucket();
    if (!bucket) continue;  // who needs the map waits for it
    ErrorSource step = ErrorSource::kFuture;
    try {
      if (launch.future) {
        wait_awake(*launch.future, awake_until);
        launch.future->waitAndThrow();
        observations_.timeline.waited_for(*bucket);
      }
      if (failure) continue;
      step = ErrorSource::kDelivery;
      const at::Tensor result = result_of(launch);
      if (!is_shadow) launch.collective->deliver(result);
    } catch (...) {
      if (failure) continue;
      const Launch* const map =
          step == ErrorSource::kDelivery ? failed_map(iteration) : nullptr;
      failure =
          map ? failure_of(iteration, ErrorSource::kFuture, *map->collective)
              : failure_of(iteration, step, *launch.collective);
    }
  }
  if (!failure) return;
  if (graph_.used) graph_.used->clear_marks();
  ++observations_.aborted;
  raise(*failure, iteration.iteration);
}

// Null unless the used map's sum has failed, which a bucket is delivered by.
const Launch* Reducer::failed_map(const IterationState& iteration) const {
  const auto map = std::ranges::find_if(
      iteration.launches,
      [](const Launch& launch) { return !launch.collective->bucket(); });
  const bool has_failed = map != iteration.launches.end() && map->future &&
                          map->future->completed() && map->future->hasError();
  return has_failed ? &*map : nullptr;
}

void Reducer::deliver_what_all_ranks_have(IterationState& iteration,
                                          bool is_shadow) {
  std::optional<Failure> failure;
  if (!iteration.chained.empty()) {
    failure = launch_chained(iteration);
    // One that a rank has not launched would be waited for in vain.
    tell_of_results(iteration, {.kind = StatusKind::kLaunch}, failure);
  }
  std::vector<std::pair<Collective*, at::Tensor>> results;
  for (Launch& launch : iteration.launches) {
    // Who needs the map waits for it.
    if (!launch.collective->bucket()) continue;
    try {
      await_result(launch);
      if (!failure) results.emplace_back(launch.collective, result_of(launch));
    } catch (...) {
      if (failure) continue;
      failure = failure_of(iteration, ErrorSource::kFuture, *launch.collective);
    }
  }
  if (!failure) failure = find_unordered_collectives(iteration);
  tell_of_results(iteration, {.kind = StatusKind::kArrived}, failure);
  if (graph_.hook_counts) graph_.hook_counts->confirm();
  if (is_shadow) return;
  try {
    for (const auto& [collective, result] : results) {
      collective->deliver(result);
    }
  } catch (...) {
    const Launch* const map = failed_map(iteration);
    if (map == nullptr) throw;
    graph_.used->clear_marks();
    ++observations_.aborted;
    raise(failure_of(iteration, ErrorSource::kFuture, *map->collective),
          iteration.iteration);
  }
}

// In the order of the buckets on every rank, on the thread that ends backward.
std::optional<Reducer::Failure> Reducer::launch_chained(
    IterationState& iteration) {
  try {
    const ChainedCollectives::Scope none_behind_these(iteration.chained);
    iteration.chained.launch(group_timeout(*group_),
                             [this](const std::function<void()>& launch) {
                               statuses_.count(launch);
                             });
  } catch (...) {
    // Nothing can stand in for what its peers have launched.
    statuses_.lose_count();
    return failure_of(iteration, ErrorSource::kFuture, bound_.buckets.front());
  }
  return std::nullopt;
}

void Reducer::await_result(Launch& launch) {
  if (!launch.future) return;
  const std::chrono::milliseconds timeout = group_timeout(*group_);
  launch.is_overdue = !wait_for(*launch.future, timeout);
  TORCH_CHECK(!launch.is_overdue, "the future of ", describe(hook_),
              " was not done within ", timeout.count() / 1000.0,
              " s, the group's timeout.\nComplete it on every rank.");
  launch.future->waitAndThrow();
  observations_.timeline.waited_for(*launch.collective->bucket());
}

// Of a hook's continuations, which run in another order on each rank. One
// bucket has but one order.
std::optional<Reducer::Failure> Reducer::find_unordered_collectives(
    const IterationState& iteration) {
  const bool has_seen_any = iteration.continuations.has_value() &&
                            iteration.continuations->has_seen_any();
  if (!has_seen_any || bound_.buckets.size() < 2) return std::nullopt;
  Failure failure =
      failure_of(iteration, ErrorSource::kFuture, bound_.buckets.front());
  failure.error = std::make_exception_ptr(std::runtime_error(absl::StrCat(
      describe(hook_),
      " launched collectives in a continuation of its future: "
      "continuations run in another order on each rank, so that results "
      "are wrong.\nLaunch them by then_collective().")));
  return failure;
}

// Throws on all ranks alike if one has failed.
void Reducer::tell_of_results(IterationState& iteration, RankStatus own,
                              const std::optional<Failure>& failure) {
  if (failure) {
    own = {.kind = StatusKind::kFailed,
           .unit = static_cast<int64_t>(*failure->collective->bucket()),
           .text = status_text(words_of_exception(failure->error))};
  }
  try {
    const StatusComparison comparison = compare(iteration, own);
    if (!failure) throw_if_apart(comparison);
  } catch (...) {
    ++observations_.aborted;
    forget_observations();
    if (!failure) throw;
  }
  if (!failure) return;
  ++observations_.aborted;
  forget_observations();
  if (hook_.throws_own_errors) std::rethrow_exception(failure->error);
  rethrow_hook_error(failure->error, failure->where);
}

void Reducer::release_memory() {
  for (Bucket& bucket : bound_.buckets) bucket.release_memory();
  bound_.memory = {};
}

}  // namespace brigade
