// Tells an engine of the gradients of its variables: what its hooks call, by
// its type.
//
// Thread safety: as Engine::gradient_ready().

#ifndef BRIGADE_ENGINE_STATE_ENGINE_LISTENER_H_
#define BRIGADE_ENGINE_STATE_ENGINE_LISTENER_H_

#include "brigade/planning/variable_index.h"

namespace brigade {

class Engine;

class EngineListener {
 public:
  // REQUIRES: the engine outlives what has this.
  explicit EngineListener(Engine& engine) : engine_(&engine) {}
  void operator()(VariableIndex variable, bool is_defined) const;

 private:
  Engine* engine_;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STATE_ENGINE_LISTENER_H_
