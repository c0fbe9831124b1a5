// Everything that belongs to one iteration and dies with it.
//
// Made when a backward is prepared, dropped when the results have been
// delivered or the iteration is aborted.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_ITERATION_H_
#define BRIGADE_ENGINE_ITERATION_H_

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm_hooks/continuation_watch.h"
#include "brigade/comm_hooks/then_collective.h"
#include "brigade/engine/backward_membership.h"
#include "brigade/engine/collective.h"
#include "brigade/planning/launch_order.h"
#include "brigade/planning/ready_variables.h"

namespace brigade {

struct Launch {
  Collective* collective = nullptr;
  c10::intrusive_ptr<c10::ivalue::Future> future;  // null: nothing to await
  bool has_travelled = false;  // also when the future has been let go of
  bool is_overdue = false;     // was waited for as long as anything is
};

inline bool is_pending(const Launch& launch) {
  return launch.future && !launch.future->completed();
}

inline int64_t num_units(std::span<Collective* const> sequence) {
  return std::ranges::count_if(sequence, [](const Collective* collective) {
    return collective->unit().has_value();
  });
}

inline int64_t num_units(std::span<const Launch> launches) {
  return std::ranges::count_if(launches, [](const Launch& launch) {
    return launch.collective->unit().has_value();
  });
}

inline LaunchOrder launch_order_of(std::span<Collective* const> sequence) {
  std::vector<size_t> pending;
  pending.reserve(sequence.size());
  for (const Collective* collective : sequence) {
    pending.push_back(collective->num_awaited());
  }
  return LaunchOrder(std::move(pending));
}

struct Iteration {
  Iteration(Preparation preparation,
            std::span<Collective* const> sequence_of_it, size_t num_variables)
      : preparation(preparation),
        number(preparation.iteration),
        sequence(sequence_of_it),
        order(launch_order_of(sequence)),
        ready(num_variables) {
    launches.reserve(sequence.size());
  }

  const Preparation preparation;
  const int64_t number;                   // that its backward makes it
  bool creates_graph = false;             // its backward does
  const at::ThreadLocalState preparer;    // of the thread that prepared
  std::span<Collective* const> sequence;  // what is launched, in this order
  LaunchOrder order;                      // of the sequence
  ReadyVariables ready;                   // by number
  // As far as the sequence has come; without the one that threw.
  std::vector<Launch> launches;
  size_t num_delivered = 0;    // of these, before the end of the iteration
  ChainedCollectives chained;  // behind those of the hooks
  std::optional<ContinuationWatch> continuations;  // of a user's new hook
  std::string failure;  // what went wrong first, told to the other ranks
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_ITERATION_H_
