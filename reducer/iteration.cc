#include "brigade/reducer/iteration.h"

#include <algorithm>
#include <utility>

#include "brigade/comm/errors/message_of.h"

namespace brigade {

Iteration::Iteration(Preparation prepared_by, int rank,
                     std::span<Collective* const> sequence_of_it,
                     size_t num_variables)
    : preparation(prepared_by),
      number(prepared_by.iteration),
      occasion{.iteration = number, .rank = rank},
      sequence(sequence_of_it),
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

}  // namespace brigade
