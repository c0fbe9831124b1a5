// What an engine does beside its policy's business: what ranks tell each other
// and when, and how long it waits for them. Its owner decides;
// reducer/reducer_options.h has DDP's.
//
// Thread safety: values.

#ifndef BRIGADE_ENGINE_STATE_ENGINE_OPTIONS_H_
#define BRIGADE_ENGINE_STATE_ENGINE_OPTIONS_H_

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "brigade/engine/state/engine_listener.h"
#include "brigade/hooks/gradient_hooks.h"

namespace brigade {

struct EngineOptions {
  // Begins the texts of errors: "Reducer".
  std::string name;

  // Ranks tell each other where they are (docs/protocol.md, "Statuses"). False:
  // a failure ends the group, and peers hear of it from that.
  bool has_control_channel = true;

  // Whether a rank goes on from the end of an iteration before it knows that
  // all ranks have ended it well, and looks at that when the next one begins.
  // Unset: where collectives don't keep the host waiting, on devices. Never
  // where a hook chains collectives, or a user's hook gives results on the CPU.
  std::optional<bool> defers_status_check = std::nullopt;

  // Then: so many iterations may be delivered before all ranks are known to
  // have ended the first of them, which is how many steps a host may be ahead
  // of its slowest peer's. 1 at least; alike on all ranks.
  int max_unconfirmed_iterations = 1;

  // A rank whose backward fails waits so long for its peers to hear it.
  std::chrono::milliseconds failure_patience;

  // A backward that brings some gradients but not all is an error at its end.
  bool one_backward_per_forward;

  // Makes the hooks of an engine's variables where somebody takes gradients in
  // place of `.grad`, who outlives the engine. Unset: nobody does.
  std::function<std::shared_ptr<GradientHooks>(
      std::span<const std::vector<at::Tensor>> replicas,
      const EngineListener& listener)>
      make_hooks = {};

  // A rank whose iteration fails launches the rest of the sequence at once, and
  // then tells its peers: whoever waits for an entry in the middle of its
  // backward goes on. REQUIRES: the groups are the policy's alone, and ranks
  // compare each iteration.
  bool launches_rest_when_failing = false;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_ENGINE_OPTIONS_H_
