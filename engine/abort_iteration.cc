#include "brigade/engine/abort_iteration.h"

#include <c10/util/Exception.h>

#include <exception>
#include <memory>
#include <string>

#include "brigade/comm/errors/message_of.h"
#include "brigade/engine/agreement/rank_agreement.h"
#include "brigade/engine/launching/launching.h"

namespace brigade {

void abort_iteration(EngineState& state) {
  const bool is_known =
      state.phase == Phase::kLost || state.phase == Phase::kResynced;
  const std::shared_ptr<Iteration> iteration = state.take_iteration();
  state.membership.mark_finished(iteration->preparation,
                                 /*may_be_repeated=*/false);
  ++state.observations.aborted;
  if (!is_known && state.options.launches_rest_when_failing &&
      iteration->has_begun_together) {
    try {
      state.policy.launch_rest_beside();
      launch_rest(state, *iteration);
    } catch (...) {
      for (size_t group = 0; group < state.groups.size(); ++group) {
        state.peers.on(group).abort();
      }
      iteration->failure = message_of(std::current_exception());
    }
  }
  state.policy.on_iteration_over(Outcome::kAborted, iteration->is_shadow);
  if (is_known) return;
  if (iteration->failure.empty()) {
    iteration->failure = "an exception ended backward";
  }
  std::string problem;
  try {
    const StatusComparison comparison =
        compare(state, *iteration,
                {.kind = StatusKind::kFailed,
                 .unit = next_unit(*iteration),
                 .text = status_text(iteration->failure)},
                state.options.failure_patience);
    if (comparison.deficit.ok()) return;
    problem = std::string(comparison.deficit.status().message());
  } catch (...) {
    problem = message_of(std::current_exception());
  }
  TORCH_WARN(state.options.name, ": while aborting ",
             describe(state.occasion(iteration->number)), ": ", problem);
}

}  // namespace brigade
