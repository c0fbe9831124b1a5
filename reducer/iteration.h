// Everything that belongs to one iteration and dies with it.
//
// Made when a backward is prepared, dropped when the results have been
// delivered or the iteration is aborted.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_ITERATION_H_
#define BRIGADE_REDUCER_ITERATION_H_

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
#include "brigade/planning/launch_order.h"
#include "brigade/reducer/backward_membership.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/occasion.h"

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
  std::vector<uint32_t> num_pending;
  num_pending.reserve(sequence.size());
  for (const Collective* collective : sequence) {
    num_pending.push_back(static_cast<uint32_t>(collective->num_awaited()));
  }
  return LaunchOrder(std::move(num_pending));
}

struct Iteration {
  Iteration(Preparation prepared_by, int rank,
            std::span<Collective* const> sequence_of_it, size_t num_variables)
      : preparation(prepared_by),
        number(prepared_by.iteration),
        occasion{.iteration = number, .rank = rank},
        sequence(sequence_of_it),
        order(launch_order_of(sequence)),
        is_ready(num_variables) {
    launches.reserve(sequence.size());
  }

  const Preparation preparation;
  const int64_t number;  // that its backward makes it
  const Occasion occasion;
  bool creates_graph = false;             // its backward does
  bool is_shadow = false;                 // this rank contributes nothing
  bool has_begun_together = false;        // ranks have compared where it begins
  const at::ThreadLocalState preparer;    // of the thread that prepared
  std::span<Collective* const> sequence;  // what is launched
  LaunchOrder order;                      // of the sequence
  std::vector<char> is_ready;             // by number of the variable
  std::vector<Launch> launches;           // without the one that threw
  ChainedCollectives chained;
  std::optional<ContinuationWatch> continuations;  // of a user's new hook
  std::string failure;  // what went wrong first, told to the other ranks
};

// Variables whose gradients are not ready, ascending.
inline std::vector<size_t> missing(const Iteration& iteration) {
  std::vector<size_t> variables;
  for (size_t i = 0; i < iteration.is_ready.size(); ++i) {
    if (!iteration.is_ready[i]) variables.push_back(i);
  }
  return variables;
}

// The unit that is to be launched next, or how many there are: where an
// iteration that fails has come to.
inline int64_t next_unit(const Iteration& iteration) {
  for (size_t entry = 0; entry < iteration.sequence.size(); ++entry) {
    const std::optional<size_t> unit = iteration.sequence[entry]->unit();
    if (unit && !iteration.order.is_launched(entry)) {
      return static_cast<int64_t>(*unit);
    }
  }
  return num_units(iteration.sequence);
}

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ITERATION_H_
