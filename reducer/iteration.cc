#include "brigade/reducer/iteration.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"

namespace brigade {
namespace {

std::optional<Failure> launch(Iteration& iteration, Collective& entry,
                              PeerStatus& peers, Observations& observations) {
  const std::optional<size_t> unit = entry.unit();
  Launch launch = {.collective = &entry, .future = nullptr};
  if (entry.is_left_out()) {
    if (unit) ++observations.counts.buckets_skipped;
  } else {
    try {
      peers.count([&] {
        std::optional<ProfilerRange> range;
        if (unit) {
          range.emplace(observations.launch_names[*unit]);
          observations.timeline.launch_begins(*unit, entry.buffer_bytes());
        }
        const ChainedCollectives::Scope chaining(iteration.chained);
        launch.future = entry.launch(/*on_zeros=*/iteration.is_shadow);
      });
    } catch (...) {
      return failure_of(iteration.id, ErrorSource::kHook, entry);
    }
    if (unit) ++observations.counts.buckets_launched;
  }
  if (unit) observations.launched(*unit, launch.future.get());
  iteration.launches.push_back(std::move(launch));
  return std::nullopt;
}

// Stands for all buckets in a failure that concerns all of them.
Collective& first_unit(const Iteration& iteration) {
  return **std::ranges::find_if(
      iteration.sequence,
      [](const Collective* entry) { return entry->unit().has_value(); });
}

}  // namespace

ProfilerRange::ProfilerRange(const std::string& name) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return;
  function_.emplace(*std::move(callbacks));
  function_->before(name, c10::ArrayRef<const c10::IValue>());
}

void Observations::bind(std::vector<c10::Device> devices,
                        size_t num_variables) {
  pack_names.clear();
  launch_names.clear();
  for (size_t b = 0; b < devices.size(); ++b) {
    const std::string bucket =
        absl::StrCat("brigade: bucket ", b, " of ", devices.size());
    pack_names.push_back(absl::StrCat(bucket, " pack"));
    launch_names.push_back(absl::StrCat(bucket, " launch"));
  }
  progress->num_units.store(static_cast<int64_t>(devices.size()),
                            std::memory_order_relaxed);
  timeline.bind(std::move(devices), num_variables);
}

void Observations::iteration_begins(int64_t iteration) {
  timeline.restart();
  progress->iteration.store(iteration, std::memory_order_relaxed);
  progress->launched.store(0, std::memory_order_relaxed);
}

void Observations::launched(size_t unit, c10::ivalue::Future* future) {
  if (future != nullptr) timeline.launched(unit, *future);
  progress->launched.fetch_add(1, std::memory_order_relaxed);
}

Failure failure_of(IterationId id, ErrorSource source, Collective& collective) {
  return {.error = std::current_exception(),
          .source = source,
          .collective = &collective,
          .where = absl::StrCat("Reducer: ", describe_place(collective, id))};
}

bool is_peer_failure(const Failure& failure) {
  const bool by_network_only = failure.collective->fails_by_network_only();
  try {
    std::rethrow_exception(failure.error);
  } catch (const c10::DistBackendError&) {
    return true;
  } catch (const c10::Error& known) {
    return by_network_only && failure.source != ErrorSource::kDelivery &&
           typeid(known) == typeid(c10::Error);
  } catch (...) {
    return failure.source == ErrorSource::kFuture ||
           (by_network_only && failure.source == ErrorSource::kHook);
  }
}

void rethrow_hook_error(const Failure& failure) {
  try {
    std::rethrow_exception(failure.error);
  } catch (c10::Error& known) {
    known.add_context(failure.where);
    throw;
  } catch (const std::exception& unknown) {
    TORCH_CHECK(false, failure.where,
                ": the comm hook threw: ", unknown.what());
  } catch (...) {
    TORCH_CHECK(false, failure.where,
                ": the comm hook threw an unknown exception");
  }
}

std::string describe_place(const Collective& collective, IterationId id) {
  return absl::StrCat(collective.describe(), " in ", describe(id));
}

// ---- Membership of backwards

void BackwardMembership::prepared(bool outputs_are_watched) {
  outputs_ = outputs_are_watched ? Outputs::kWatched : Outputs::kUnwatched;
  early_.clear();
}

void BackwardMembership::note_local_forward() {
  if (outputs_ == Outputs::kWatched) outputs_ = Outputs::kRequired;
}

bool BackwardMembership::local_output_reached(int backward_id) {
  if (std::ranges::count(local_backwards_, backward_id) > 0) return false;
  local_backwards_.push_back(backward_id);
  return true;
}

void BackwardMembership::local_backward_ended(int backward_id) {
  std::erase(local_backwards_, backward_id);
}

bool BackwardMembership::is_local(int backward_id) const {
  return std::ranges::any_of(local_backwards_,
                             [&](int id) { return id <= backward_id; });
}

bool BackwardMembership::is_undecided(int backward_id) const {
  return outputs_ == Outputs::kRequired || is_local(backward_id);
}

std::vector<EarlyGradient> BackwardMembership::take_early_gradients(
    int backward_id) {
  std::vector<EarlyGradient> taken = std::exchange(early_, {});
  std::erase_if(taken, [&](const EarlyGradient& gradient) {
    return gradient.backward_id < backward_id;
  });
  return taken;
}

void BackwardMembership::mark_finished(Preparation preparation,
                                       bool may_be_repeated) {
  last_finished_ = preparation.number;
  if (may_be_repeated) last_repeatable_ = preparation.number;
}

void BackwardMembership::output_reached(Preparation preparation,
                                        int backward_id) {
  reached_ = preparation;
  reached_by_ = backward_id;
}

std::optional<int64_t> BackwardMembership::finished_iteration_of(
    int backward_id) const {
  if (backward_id != reached_by_ || !is_finished(reached_) ||
      reached_.number == last_repeatable_) {
    return std::nullopt;
  }
  return reached_.iteration;
}

// ---- The iteration

Iteration::Iteration(Preparation prepared_by, int rank,
                     std::span<Collective* const> launch_sequence,
                     size_t num_variables)
    : preparation(prepared_by),
      number(prepared_by.iteration),
      id{.iteration = number, .rank = rank},
      sequence(launch_sequence),
      order(launch_order_of(sequence)),
      is_ready(num_variables) {
  launches.reserve(sequence.size());
}

void Iteration::fail(const std::exception_ptr& error) {
  if (phase == Phase::kOver) return;
  phase = Phase::kFailed;
  if (failure.empty()) failure = message_of(error);
}

LaunchOrder launch_order_of(std::span<Collective* const> sequence) {
  std::vector<uint32_t> num_pending;
  num_pending.reserve(sequence.size());
  for (const Collective* collective : sequence) {
    num_pending.push_back(static_cast<uint32_t>(collective->num_awaited()));
  }
  return LaunchOrder(std::move(num_pending));
}

int64_t num_units(std::span<Collective* const> sequence) {
  return std::ranges::count_if(sequence, [](const Collective* collective) {
    return collective->unit().has_value();
  });
}

int64_t num_units(std::span<const Launch> launches) {
  return std::ranges::count_if(launches, [](const Launch& launch) {
    return launch.collective->unit().has_value();
  });
}

std::vector<size_t> missing(const Iteration& iteration) {
  std::vector<size_t> variables;
  for (size_t i = 0; i < iteration.is_ready.size(); ++i) {
    if (!iteration.is_ready[i]) variables.push_back(i);
  }
  return variables;
}

int64_t next_unit(const Iteration& iteration) {
  for (size_t entry = 0; entry < iteration.sequence.size(); ++entry) {
    const std::optional<size_t> unit = iteration.sequence[entry]->unit();
    if (unit && !iteration.order.is_launched(entry)) {
      return static_cast<int64_t>(*unit);
    }
  }
  return num_units(iteration.sequence);
}

void pack(const Iteration& iteration, size_t entry,
          Observations& observations) {
  Collective& collective = *iteration.sequence[entry];
  if (!collective.needs_pack()) return;
  const size_t unit = *collective.unit();
  const ProfilerRange range(observations.pack_names[unit]);
  observations.timeline.pack_begins(unit);
  collective.pack();
  observations.timeline.pack_ends(unit);
}

std::optional<Failure> launch_ready(Iteration& iteration, PeerStatus& peers,
                                    Observations& observations) {
  LaunchOrder& order = iteration.order;
  while (const auto next = order.next()) {
    if (auto failure = launch(iteration, *iteration.sequence[*next], peers,
                              observations)) {
      return failure;
    }
    order.launched();
  }
  return std::nullopt;
}

void launch_rest(Iteration& iteration, PeerStatus& peers,
                 Observations& observations) {
  const HookScope scope(iteration.preparer);
  for (size_t entry = 0; entry < iteration.sequence.size(); ++entry) {
    Collective& next = *iteration.sequence[entry];
    if (iteration.order.is_launched(entry) || next.is_left_out()) continue;
    Launch launch = {.collective = &next, .future = nullptr};
    peers.count([&] {
      const ChainedCollectives::Scope chaining(iteration.chained);
      launch.future = next.launch(/*on_zeros=*/true);
    });
    if (next.unit()) ++observations.counts.buckets_launched;
    iteration.launches.push_back(std::move(launch));
  }
}

std::optional<Failure> launch_chained(Iteration& iteration, PeerStatus& peers,
                                      std::chrono::milliseconds timeout) {
  try {
    const ChainedCollectives::Scope none_after_these(iteration.chained);
    iteration.chained.launch(timeout, [&](const std::function<void()>& launch) {
      peers.count(launch);
    });
    return std::nullopt;
  } catch (...) {
    // A second collective can't be launched on zeros.
    peers.set_cannot_continue();
    return failure_of(iteration.id, ErrorSource::kFuture,
                      first_unit(iteration));
  }
}

std::optional<Failure> find_unordered_collectives(const Iteration& iteration,
                                                  const HookTraits& hook) {
  const bool has_seen_any = iteration.continuations.has_value() &&
                            iteration.continuations->has_seen_any();
  if (!has_seen_any || num_units(iteration.sequence) < 2) return std::nullopt;
  Failure failure =
      failure_of(iteration.id, ErrorSource::kFuture, first_unit(iteration));
  failure.error = std::make_exception_ptr(std::runtime_error(absl::StrCat(
      describe(hook),
      " launched collectives in a continuation of its future: "
      "continuations run in a different order on each rank, so results would "
      "be wrong.\nLaunch them by then_collective().")));
  return failure;
}

}  // namespace brigade
