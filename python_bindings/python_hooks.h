// Comm hooks that call Python, and the wait for their calls when the
// interpreter exits.
//
// Thread safety: hooks may be called on any thread and take the GIL themselves.
// The caller may hold the reducer's lock. Whoever waits for that lock or for a
// hook's future must not hold the GIL.

#ifndef BRIGADE_PYTHON_BINDINGS_PYTHON_HOOKS_H_
#define BRIGADE_PYTHON_BINDINGS_PYTHON_HOOKS_H_

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "brigade/comm_hooks/comm_hooks.h"

namespace brigade {

using CommHookPtr = std::shared_ptr<c10d::CommHookInterface>;

// Calls `hook` with `state` and a torch.distributed.GradBucket; it returns a
// torch.futures.Future of a tensor. Backward raises the very object that the
// hook raises. Errors: RuntimeError in runHook() if the hook returns something
// else. REQUIRES: the GIL is held.
CommHookPtr python_comm_hook(py::object state, py::object hook,
                             const std::string& name);

// `object`, whose last owner may go on any thread. REQUIRES: the GIL is held.
std::shared_ptr<py::object> held_object(py::object object);

// Calls `step` with the parameter. REQUIRES: the GIL is held.
ParameterStep python_step(py::object step);

// `hook`, then `step` of the parameters for which `is_stepped` is true. Errors
// of `hook` are treated as if it were alone.
CommHookPtr python_stepping_hook(CommHookPtr hook, ParameterStep step,
                                 ParameterFilter is_stepped);

// `hook` with buckets of raw gradients in `dtype`, a floating-point one: the
// hook of torch's native mixed precision.
CommHookPtr reduced_precision_hook(CommHookPtr hook, at::ScalarType dtype);

// Waits a few seconds at most until no other thread will call Python. Called at
// exit, without the GIL.
//
// A thread of the process group takes the GIL to run and to destroy Python
// continuations, and to drop tensors of collectives that Python made; once the
// interpreter is gone, that ends the process. So this waits for the futures of
// these hooks, for a moment for those that are done but still referred to, and
// then until no such thread is running.
void wait_at_exit();

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_PYTHON_HOOKS_H_
