// Lets the interpreter exit only when no other thread will call into it.
//
// Continuations written in Python run on a thread of the process group, which
// takes the GIL, to run them and once more to destroy them; once the
// interpreter is gone, that ends the process. So it waits at exit for the
// futures of Python hooks that are still open: those of an iteration that
// failed are done in milliseconds, as its connections are closed. A moment
// longer it waits for those that are done but referred to, perhaps by the
// continuation that made them.
//
// A thread of the group also takes the GIL to drop the tensors of a collective
// that Python made, a moment after the collective is done. Nothing tells when
// it has, so it waits until no such thread runs: without the GIL in the way one
// that is about to drop something does.
//
// Thread safety: all functions may be called from any thread.

#ifndef BRIGADE_PYTHON_BINDINGS_EXIT_WAIT_H_
#define BRIGADE_PYTHON_BINDINGS_EXIT_WAIT_H_

#include <ATen/core/ivalue.h>

namespace brigade {

// `future` is to be done before the interpreter exits. Keeps nothing alive.
void wait_for_at_exit(const c10::intrusive_ptr<c10::ivalue::Future>& future);

// Waits for all of them and for the group's threads, a few seconds at most.
// Called at exit, without the GIL.
void wait_at_exit();

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_EXIT_WAIT_H_
