#include "brigade/engine/describe_progress.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/engine/observing/progress.h"
#include "brigade/engine/state/phase.h"

namespace brigade {

std::string describe_progress(const EngineState& state) {
  if (is_between(state.phase)) {
    return absl::StrCat("has prepared nothing since iteration ",
                        state.observations.begun);
  }
  const Iteration& iteration = *state.iteration;
  if (!has_begun(state.phase)) {
    return absl::StrCat("has prepared iteration ", iteration.number,
                        ", whose backward has reached no parameter");
  }
  std::string words =
      absl::StrCat("has launched ", num_units(iteration.launches), " of ",
                   num_units(iteration.sequence), " buckets of iteration ",
                   iteration.number);
  const std::vector<size_t> missing = iteration.ready.missing();
  if (!missing.empty()) {
    absl::StrAppend(&words, " and waits for the gradients of ",
                    state.policy.name_of(missing));
  }
  return words;
}

std::string describe_busy_progress(const EngineState& state) {
  const Progress& progress = *state.observations.progress;
  return absl::StrCat("has launched ", progress.launched.load(), " of ",
                      progress.num_units.load(), " buckets of iteration ",
                      progress.iteration.load(),
                      progress.is_waiting() ? " and waits for its peers"
                                            : " and is inside a hook");
}

}  // namespace brigade
