// What a policy may do to the running iteration while the engine asks it
// something.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_RUNNING_ITERATION_H_
#define BRIGADE_ENGINE_RUNNING_ITERATION_H_

#include <cstddef>

#include "brigade/engine/state/slot.h"

namespace brigade {

struct EngineState;

// For the time of a call.
class RunningIteration {
 public:
  explicit RunningIteration(EngineState& state) : state_(state) {}
  RunningIteration(const RunningIteration&) = delete;
  RunningIteration& operator=(const RunningIteration&) = delete;

  // The gradient of a variable, by number, is as ready as it will be. Packs the
  // entry if it was the last that this waits for. REQUIRES: it was not ready.
  void mark(size_t variable, Slot slot);

  // Launches what is ready, waits for the first entry and delivers it.
  // REQUIRES: it has no unit.
  void deliver_first();

 private:
  EngineState& state_;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_RUNNING_ITERATION_H_
