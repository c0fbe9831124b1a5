// A collective that has failed: made an error that says where, and whose fault
// it is.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_ENGINE_LAUNCHING_FAILURE_H_
#define BRIGADE_ENGINE_LAUNCHING_FAILURE_H_

#include <cstdint>
#include <exception>
#include <string>

#include "brigade/engine/state/collective.h"
#include "brigade/engine/state/collective_error.h"
#include "brigade/engine/state/engine_state.h"
#include "brigade/engine/state/iteration.h"

namespace brigade {

struct Failure {
  std::exception_ptr error;
  ErrorSource source = ErrorSource::kFuture;
  Collective* collective = nullptr;
  std::string where = {};  // describes it, which may be gone by then
};

// Of the exception that is being handled.
Failure failure_of(const EngineState& state, const Iteration& iteration,
                   ErrorSource source, Collective& collective);

// Throws it with its place in front. A peer's failure ends the group and is
// told to those that still answer. REQUIRES: its collective is there.
[[noreturn]] void throw_failure(EngineState& state, const Failure& failure,
                                int64_t iteration);

// "bucket 1 of 3 (parameter 4) in iteration 17 on rank 2".
std::string describe_place(const EngineState& state,
                           const Collective& collective, int64_t iteration);

}  // namespace brigade

#endif  // BRIGADE_ENGINE_LAUNCHING_FAILURE_H_
