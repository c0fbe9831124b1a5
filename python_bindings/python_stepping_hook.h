// A comm hook behind which optimizers written in Python step while backward
// goes on (comm_hooks/comm_hooks.h).
//
// This adds what calling Python from the threads of a process group takes: the
// GIL, and that the interpreter doesn't exit before the steps are made.
//
// Thread safety: as the hook inside. The GIL must not be held by whoever waits
// for a hook's future.

#ifndef BRIGADE_PYTHON_BINDINGS_PYTHON_STEPPING_HOOK_H_
#define BRIGADE_PYTHON_BINDINGS_PYTHON_STEPPING_HOOK_H_

#include <pybind11/pybind11.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/comm_hooks.h"

namespace brigade {

// Calls `step` with the parameter. REQUIRES: the GIL is held.
ParameterStep python_step(pybind11::object step);

// `hook`, then `step` of the parameters that `is_stepped` is true of. What
// `hook` throws is treated as if it were alone.
std::shared_ptr<c10d::CommHookInterface> python_stepping_hook(
    std::shared_ptr<c10d::CommHookInterface> hook, ParameterStep step,
    ParameterFilter is_stepped);

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_PYTHON_STEPPING_HOOK_H_
