#include "brigade/engine/running_iteration.h"

#include "brigade/engine/delivery.h"
#include "brigade/engine/launching/launching.h"
#include "brigade/engine/state/engine_state.h"

namespace brigade {

void RunningIteration::mark(size_t variable, Slot slot) {
  if (slot.has_gradient) {
    state_.observations.timeline.gradient_ready(state_.variable(variable));
  }
  state_.iteration->ready.mark(variable);
  mark_and_pack(state_, slot.entry);
}

void RunningIteration::deliver_first() {
  launch_ready(state_);
  brigade::deliver_first(state_, *state_.iteration);
}

}  // namespace brigade
