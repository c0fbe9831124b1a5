#include "brigade/engine/launching/failure.h"

#include <exception>
#include <optional>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/engine/state/phase.h"

namespace brigade {

Failure failure_of(const EngineState& state, const Iteration& iteration,
                   ErrorSource source, Collective& collective) {
  return {.error = std::current_exception(),
          .source = source,
          .collective = &collective,
          .where = absl::StrCat(
              state.options.name, ": ",
              describe_place(state, collective, iteration.number))};
}

void throw_failure(EngineState& state, const Failure& failure,
                   int64_t iteration) {
  const Collective& collective = *failure.collective;
  if (!is_between(state.phase)) state.failed(failure.error);
  // What an entry without a unit throws is no hook's.
  if (collective.unit() && state.policy.hook_traits().throws_own_errors) {
    std::rethrow_exception(failure.error);
  }
  if (!is_peer_failure(failure.error, failure.source,
                       collective.fails_by_network_only())) {
    rethrow_hook_error(failure.error, failure.where);
  }

  // A user's hook may use other groups, and be mistaken about the network.
  if (collective.fails_by_network_only()) {
    state.leave_group({.kind = StatusKind::kFailed,
                       .iteration = iteration,
                       .unit = static_cast<int64_t>(collective.unit().value_or(
                           num_units(state.policy.sequence()))),
                       .text = status_text(message_of(failure.error))});
    if (!is_between(state.phase)) state.phase = Phase::kOver;
  }
  // By iteration: peers may notice the same loss in another collective of it.
  const std::optional<LivenessProbe> probe =
      state.peers.find_survivors(absl::StrCat(iteration));
  throw_peer_error(failure.where, failure.error,
                   probe.has_value() ? &*probe : nullptr);
}

std::string describe_place(const EngineState& state,
                           const Collective& collective, int64_t iteration) {
  return absl::StrCat(collective.describe(), " in ",
                      describe(state.occasion(iteration)));
}

}  // namespace brigade
