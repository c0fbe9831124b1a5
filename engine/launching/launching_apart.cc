#include "brigade/engine/launching/launching_apart.h"

#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <string>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/message_of.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/engine/observing/progress.h"

namespace brigade {

void call_apart(EngineState& state, std::string_view doing,
                const std::function<void()>& collective) {
  const WaitForPeers waiting(*state.observations.progress);
  try {
    collective();
  } catch (...) {
    state.abort_group(
        {.kind = StatusKind::kFailed,
         .iteration = state.observations.begun,
         .text = status_text(message_of(std::current_exception()))});
    throw_peer_error(absl::StrCat(state.options.name, ": ", std::string(doing),
                                  " on rank ", state.group()->getRank()),
                     std::current_exception());
  }
}

void launch_opening_for_peers(EngineState& state, OpeningTold told) {
  TORCH_CHECK(state.opening &&
                  static_cast<uint16_t>(state.opening->form()) == told.form,
              "peers have launched something in front of a forward that this "
              "rank has not launched before");
  state.opening->launch_for_peers();
}

}  // namespace brigade
