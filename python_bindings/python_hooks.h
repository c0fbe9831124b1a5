// Comm hooks that call Python, and their completion at interpreter exit.
//
// Thread safety: hooks may run on any thread and acquire the GIL. The caller
// may hold the reducer's lock. A thread that waits for that lock or for a
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

// Returns a comm hook that calls `hook(state, torch.distributed.GradBucket)`,
// which returns a torch.futures.Future of a tensor. Backward raises the same
// exception object that `hook` raises. Errors: runHook() throws RuntimeError if
// `hook` returns another type. REQUIRES: the GIL is held.
CommHookPtr python_comm_hook(py::object state, py::object hook,
                             const std::string& name);

// Returns shared ownership of `object`: the deleter acquires the GIL, so that
// any thread may release it. REQUIRES: the GIL is held.
std::shared_ptr<py::object> held_object(py::object object);

// Returns a hook that runs `hook`, then `step` on the parameters for which
// `is_stepped` is true. Errors of `hook` are handled as those of `hook` alone.
CommHookPtr python_stepping_hook(CommHookPtr hook, ParameterStep step,
                                 ParameterFilter is_stepped);

// Error of a Python `function` that must return a future.
std::string describe_no_future(const std::string& function, py::handle found);

// Waits, at most a few seconds, until no other thread will call Python. Runs at
// exit, without the GIL.
//
// Threads of the process group acquire the GIL to run and destroy Python
// continuations and to release tensors of Python collectives. After the
// interpreter's finalization, that would crash the process. So this waits for
// the futures of these hooks, briefly for the release of completed futures, and
// until no such thread is running.
void wait_at_exit();

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_PYTHON_HOOKS_H_
