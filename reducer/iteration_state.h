// Everything that belongs to one iteration and dies with it.
//
// Made by prepare_for_backward, dropped when the gradients have been delivered
// or the iteration is given up. docs/protocol.md describes the phases.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_ITERATION_STATE_H_
#define BRIGADE_REDUCER_ITERATION_STATE_H_

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
#include "brigade/planning/ready_variables.h"
#include "brigade/planning/variable_index.h"
#include "brigade/reducer/collective.h"
#include "brigade/reducer/context_gradients.h"
#include "brigade/reducer/finished_iterations.h"
#include "brigade/reducer/unused_parameter_search.h"

namespace brigade {

enum class Phase {
  kPrepared,  // forward is done, no gradient has come
  kReducing,  // gradients come, full buckets are launched
  kFailed,    // an error is on its way out of backward; nothing is launched
};

struct Launch {
  Collective* collective = nullptr;
  c10::intrusive_ptr<c10::ivalue::Future> future;  // null: nothing travelled
  bool is_overdue = false;  // was waited for as long as anything is
};

inline bool is_pending(const Launch& launch) {
  return launch.future && !launch.future->completed();
}

inline int64_t num_buckets(std::span<const Launch> launches) {
  return std::ranges::count_if(launches, [](const Launch& launch) {
    return launch.collective->bucket().has_value();
  });
}

// A gradient that came before it was known whether its backward belongs to the
// iteration.
struct EarlyGradient {
  VariableIndex variable;
  bool is_defined;
  int backward_id;
};

inline LaunchOrder launch_order_of(std::span<Collective* const> sequence) {
  std::vector<size_t> pending;
  pending.reserve(sequence.size());
  for (const Collective* collective : sequence) {
    pending.push_back(collective->num_gradients());
  }
  return LaunchOrder(std::move(pending));
}

struct IterationState {
  IterationState(Preparation preparation,
                 std::span<Collective* const> sequence_of_it,
                 size_t num_variables)
      : preparation(preparation),
        iteration(preparation.iteration),
        sequence(sequence_of_it),
        order(launch_order_of(sequence)),
        ready(num_variables) {
    launches.reserve(sequence.size());
  }

  const Preparation preparation;
  const int64_t iteration;  // that its backward makes it
  Phase phase = Phase::kPrepared;
  bool is_shadow = false;               // zeros travel, nothing is delivered
  bool creates_graph = false;           // its backward does
  const at::ThreadLocalState preparer;  // of the thread that prepared
  ContextGradients context_gradients;
  std::span<Collective* const> sequence;  // what is launched, in this order
  LaunchOrder order;                      // of the sequence
  ReadyVariables ready;                   // by number
  // As far as the sequence has come; without the one that threw.
  std::vector<Launch> launches;
  ChainedCollectives chained;                      // behind those of the hooks
  std::optional<ContinuationWatch> continuations;  // of a user's new hook

  // The backward whose end is being watched, by its id. Reentrant backwards
  // inside of it are not watched.
  std::optional<int> watched_backward;

  // A forward that is not to be reduced has run since: only backwards that go
  // through the prepared outputs are this iteration's.
  bool only_through_outputs = false;
  bool outputs_are_watched = false;
  std::vector<EarlyGradient> early_gradients;

  UnusedPrediction prediction;  // of parameters that backward will not reach

  // Nothing is launched any more. `words` are for the other ranks; the first
  // ones are kept.
  void failed(std::string words) {
    phase = Phase::kFailed;
    if (failure.empty()) failure = std::move(words);
  }
  std::string failure;

  // All ranks know how it ended.
  bool is_settled = false;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_ITERATION_STATE_H_
