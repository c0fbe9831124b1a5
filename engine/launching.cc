#include "brigade/engine/launching.h"

#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "brigade/comm/group_timeout.h"
#include "brigade/engine/delivery.h"
#include "brigade/engine/hook_scope.h"
#include "brigade/engine/marker.h"

namespace brigade {
namespace {

void pack(EngineState& state, Collective& entry) {
  if (!entry.needs_pack()) return;
  const HookScope scope(state.iteration->preparer);
  std::optional<ObservedPack> packing;
  if (entry.unit()) packing.emplace(state.observations, *entry.unit());
  entry.pack();
}

void launch(EngineState& state, Collective& entry) {
  Iteration& iteration = *state.iteration;
  const std::optional<size_t> unit = entry.unit();
  Launch launch = {.collective = &entry, .future = nullptr};
  if (entry.is_left_out()) {
    if (unit) ++state.observations.units_left_out;
  } else {
    try {
      state.peers.count([&] {
        std::optional<ObservedLaunch> launching;
        if (unit) launching.emplace(state.observations, *unit);
        const ChainedCollectives::Scope chaining(iteration.chained);
        launch.future = state.phase == Phase::kShadowing
                            ? entry.launch_substitute()
                            : entry.launch();
      });
    } catch (...) {
      throw_failure(state,
                    failure_of(state, iteration, ErrorSource::kHook, entry),
                    iteration.number);
    }
    if (unit) ++state.observations.units_launched;
  }
  launch.has_travelled = launch.future != nullptr;
  iteration.launches.push_back(std::move(launch));
  state.observations.launched(iteration.launches.back());
}

void launch_substitute(EngineState& state, Iteration& iteration,
                       Collective& entry) {
  const ChainedCollectives::Scope chaining(iteration.chained);
  const auto future = entry.launch_substitute();
  if (entry.unit()) ++state.observations.units_launched;
  if (!iteration.chained.empty()) {
    // Nobody launches the second ones of an iteration that is aborted.
    iteration.chained.cancel(group_timeout(*state.group));
  } else if (future) {
    future->waitAndThrow();
  }
}

}  // namespace

bool mark_entry(EngineState& state, size_t entry) {
  Iteration& iteration = *state.iteration;
  if (!iteration.order.mark(entry)) return false;
  pack(state, *iteration.sequence[entry]);
  return true;
}

void launch_ready(EngineState& state) {
  LaunchOrder& order = state.iteration->order;
  if (!order.next()) return;
  const HookScope scope(state.iteration->preparer);
  for (; const auto next = order.next(); order.launched()) {
    launch(state, *state.iteration->sequence[*next]);
  }
}

void launch_deficit(EngineState& state, Iteration& iteration,
                    int64_t num_launches) {
  for (Collective* const next :
       iteration.sequence.subspan(iteration.order.num_launched())) {
    if (num_launches == 0) return;
    if (next->is_left_out()) continue;
    launch_substitute(state, iteration, *next);
    --num_launches;
  }
  TORCH_CHECK(num_launches == 0, num_launches,
              " launches are missing beyond those of the sequence");
}

void Marker::mark(size_t variable, Slot slot) {
  if (slot.has_gradient) {
    state_.observations.timeline.gradient_ready(state_.variable(variable));
  }
  state_.iteration->ready.mark(variable);
  mark_entry(state_, slot.entry);
}

void Marker::deliver_through(size_t entry) {
  launch_ready(state_);
  brigade::deliver_through(state_, *state_.iteration, entry);
}

}  // namespace brigade
