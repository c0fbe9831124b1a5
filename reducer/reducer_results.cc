// The end of an iteration: results are waited for and become gradients.

#include <c10/util/Exception.h>

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
#include "brigade/comm_hooks/hook_name.h"
#include "brigade/comm_hooks/own_errors.h"
#include "brigade/comm_hooks/wire_format.h"
#include "brigade/reducer/hook_scope.h"
#include "brigade/reducer/reducer.h"

namespace brigade {
namespace {

std::string describe_hook(const c10d::CommHookInterface& hook) {
  const std::string name = name_of(hook);
  return name.empty() ? "the comm hook" : absl::StrCat("comm hook ", name);
}

}  // namespace

// Waits for every future, also after an error: nothing may write into a bucket
// behind the user's back.
//
// What a built-in hook's future holds is right on all ranks or on none, and is
// delivered as it comes. A user's hook may fail on one rank alone, so that
// ranks tell each other before anybody delivers.
void Reducer::finalize() {
  const std::shared_ptr<IterationState> iteration =
      std::exchange(iteration_, nullptr);
  finished_.mark_finished(iteration->preparation, iteration->creates_graph);
  const ObservedFinalize finalizing(observations_);
  end_together(*iteration,
               {.kind = SignatureKind::kEnd,
                .text = signature_text(name_of(*options_.comm_hook))});
  graph_.ready_order.observe();
  const HookScope scope(iteration->preparer);

  if (fails_by_network_only(*options_.comm_hook)) {
    deliver_as_results_come(*iteration);
  } else {
    deliver_what_all_ranks_have(*iteration);
  }
  if (graph_.used_map) graph_.used_map->clear_marks();
  observations_.timeline.finalized();
  iteration->context_gradients.write_back();
  if (options_.lazy_bucket_allocation) release_memory();
  ++observations_.reduced;
}

void Reducer::deliver_as_results_come(IterationState& iteration) {
  std::optional<BucketFailure> failure;
  const auto awake_until = std::chrono::steady_clock::now() + kMaxTimeAwake;
  for (const Launch& launch : iteration.launches) {
    if (!launch.bucket) continue;
    ErrorSource step = ErrorSource::kFuture;
    try {
      if (launch.future) {
        wait_awake(*launch.future, awake_until);
        launch.future->waitAndThrow();
        observations_.timeline.waited_for(*launch.bucket);
      }
      if (failure) continue;
      step = ErrorSource::kDelivery;
      deliver(iteration, launch, result_of(launch));
    } catch (...) {
      if (failure) continue;
      failure = {.error = std::current_exception(),
                 .source = step,
                 .bucket = *launch.bucket};
    }
  }
  if (!failure) return;
  if (graph_.used_map) graph_.used_map->clear_marks();
  ++observations_.given_up;
  rethrow(failure->error, failure->source, failure->bucket,
          iteration.iteration);
}

void Reducer::deliver_what_all_ranks_have(IterationState& iteration) {
  std::optional<BucketFailure> failure;
  if (!iteration.chained.empty()) {
    failure = launch_chained(iteration);
    // One that a rank has not launched would be waited for in vain.
    tell_of_results(iteration, {.kind = SignatureKind::kLaunch}, failure);
  }
  std::vector<at::Tensor> results;  // by launch
  for (Launch& launch : iteration.launches) {
    if (!launch.bucket) {
      results.emplace_back();
      continue;
    }
    try {
      await_result(launch);
      results.push_back(failure ? at::Tensor() : result_of(launch));
    } catch (...) {
      results.emplace_back();
      if (failure) continue;
      failure = {.error = std::current_exception(), .bucket = *launch.bucket};
    }
  }
  if (!failure) failure = find_unordered_collectives(iteration);
  tell_of_results(iteration, {.kind = SignatureKind::kArrived}, failure);
  for (size_t i = 0; i < iteration.launches.size(); ++i) {
    deliver(iteration, iteration.launches[i], results[i]);
  }
}

// In the order of the buckets on every rank, on the thread that ends backward.
std::optional<Reducer::BucketFailure> Reducer::launch_chained(
    IterationState& iteration) {
  try {
    const ChainedCollectives::Scope none_behind_these(iteration.chained);
    iteration.chained.launch(group_timeout(*group_),
                             [this](const std::function<void()>& launch) {
                               signatures_.count(launch);
                             });
  } catch (...) {
    // Nothing can stand in for what its peers have launched.
    signatures_.lose_count();
    return BucketFailure{.error = std::current_exception()};
  }
  return std::nullopt;
}

void Reducer::await_result(Launch& launch) {
  if (!launch.future) return;
  const std::chrono::milliseconds timeout = group_timeout(*group_);
  launch.is_overdue = !wait_for(*launch.future, timeout);
  TORCH_CHECK(!launch.is_overdue, "the future of ",
              describe_hook(*options_.comm_hook), " was not done within ",
              timeout.count() / 1000.0,
              " s, the group's timeout.\nComplete it on every rank.");
  launch.future->waitAndThrow();
  observations_.timeline.waited_for(*launch.bucket);
}

// Undefined: nothing travelled, or nothing is to be delivered.
at::Tensor Reducer::result_of(const Launch& launch) {
  if (!launch.future) return {};
  return bound_.buckets[*launch.bucket].result_of(launch.future->value());
}

// Of a hook's continuations, which run in another order on each rank. One
// bucket has but one order.
std::optional<Reducer::BucketFailure> Reducer::find_unordered_collectives(
    const IterationState& iteration) const {
  const bool has_seen_any = iteration.continuations.has_value() &&
                            iteration.continuations->has_seen_any();
  if (!has_seen_any || bound_.buckets.size() < 2) return std::nullopt;
  return BucketFailure{
      .error = std::make_exception_ptr(std::runtime_error(absl::StrCat(
          describe_hook(*options_.comm_hook),
          " launched collectives in a continuation of its future: "
          "continuations run in another order on each rank, so that results "
          "are wrong.\nLaunch them by then_collective().")))};
}

// Throws on all ranks alike if one has failed.
void Reducer::tell_of_results(IterationState& iteration, RankSignature own,
                              const std::optional<BucketFailure>& failure) {
  if (failure) {
    own = {.kind = SignatureKind::kFailed,
           .unit = static_cast<int64_t>(failure->bucket),
           .text = signature_text(words_of_exception(failure->error))};
  }
  try {
    const Verdict verdict = compare(iteration, own);
    if (!failure) throw_if_apart(verdict);
  } catch (...) {
    ++observations_.given_up;
    forget_observations(iteration);
    if (!failure) throw;
  }
  if (!failure) return;
  ++observations_.given_up;
  forget_observations(iteration);
  if (dynamic_cast<ThrowsOwnErrors*>(options_.comm_hook.get())) {
    std::rethrow_exception(failure->error);
  }
  rethrow_hook_error(
      failure->error,
      absl::StrCat("Reducer: ",
                   describe_place(failure->bucket, iteration.iteration)));
}

void Reducer::release_memory() {
  for (Bucket& bucket : bound_.buckets) bucket.release_memory();
  bound_.memory = {};
}

void Reducer::deliver(IterationState& iteration, const Launch& launch,
                      const at::Tensor& result) {
  if (iteration.is_shadow || !launch.bucket) return;
  Bucket& bucket = bound_.buckets[*launch.bucket];
  if (bucket.is_skipped()) return;
  const std::vector<size_t> untouched =
      untouched_slots(iteration, *launch.bucket);
  if (!launch.future) {
    bucket.deliver_empty(untouched);
  } else {
    observations_.bytes_delivered += bucket.deliver(result, untouched);
  }
}

}  // namespace brigade
