#include "brigade/engine/launching/launching.h"

#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "brigade/engine/launching/failure.h"
#include "brigade/engine/launching/hook_scope.h"

namespace brigade {
namespace {

void pack(EngineState& state, Collective& entry) {
  if (!entry.needs_pack()) return;
  const HookScope scope(state.iteration->preparer);
  std::optional<ObservedPack> packing;
  if (entry.unit()) packing.emplace(state.observations, *entry.unit());
  entry.pack();
}

void launch(EngineState& state, size_t index) {
  Iteration& iteration = *state.iteration;
  Collective& entry = *iteration.sequence[index];
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
        launch.future =
            iteration.is_shadow ? entry.launch_substitute() : entry.launch();
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

}  // namespace

bool mark_and_pack(EngineState& state, size_t entry) {
  Iteration& iteration = *state.iteration;
  if (!iteration.order.mark(entry)) return false;
  pack(state, *iteration.sequence[entry]);
  return true;
}

void launch_ready(EngineState& state) {
  LaunchOrder& order = state.iteration->order;
  if (!order.next()) return;
  const HookScope scope(state.iteration->preparer);
  while (const auto next = order.next()) {
    launch(state, *next);
    order.launched();
  }
}

void launch_rest(EngineState& state, Iteration& iteration) {
  const HookScope scope(iteration.preparer);
  for (size_t entry = 0; entry < iteration.sequence.size(); ++entry) {
    Collective& next = *iteration.sequence[entry];
    if (iteration.order.is_launched(entry) || next.is_left_out()) continue;
    Launch launch = {.collective = &next, .future = nullptr};
    state.peers.count([&] {
      const ChainedCollectives::Scope chaining(iteration.chained);
      launch.future = next.launch_substitute();
    });
    launch.has_travelled = launch.future != nullptr;
    if (next.unit()) ++state.observations.units_launched;
    iteration.launches.push_back(std::move(launch));
  }
}

}  // namespace brigade
