#include "brigade/engine/agreement/connect.h"

#include <string>

namespace brigade {

void connect(EngineState& state) {
  state.peers.connect();
  if (!state.options.has_control_channel) return;
  state.observations.watch_stalls(
      state.group(), state.peers.store_prefix(),
      {.engine = state.options.name,
       .unit = std::string(state.policy.unit_word())},
      state.describe_progress);
}

}  // namespace brigade
