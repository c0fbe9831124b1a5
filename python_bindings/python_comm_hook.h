// A comm hook written in Python: a callable that gets a state and a
// torch.distributed.GradBucket and returns a torch.futures.Future of a tensor.
//
// What the hook returns is c10d's business; this adds that an exception raised
// in Python arrives with its type and text, wherever the reducer lets it out.
//
// Thread safety: may be called on any thread; takes the GIL itself. The caller
// may hold the reducer's lock, but not the GIL while it waits for that lock.

#ifndef BRIGADE_PYTHON_BINDINGS_PYTHON_COMM_HOOK_H_
#define BRIGADE_PYTHON_BINDINGS_PYTHON_COMM_HOOK_H_

#include <torch/csrc/distributed/c10d/python_comm_hook.h>

namespace brigade {

class PythonCommHook final : public c10d::CommHookInterface {
 public:
  // REQUIRES: the GIL is held.
  PythonCommHook(py::object state, py::object hook);

  // Errors: ValueError, TypeError, IndexError, NotImplementedError if Python
  // raised one of these, RuntimeError for everything else; and TypeError naming
  // the hook if it returned no future.
  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

 private:
  c10d::PythonCommHook hook_;
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_PYTHON_COMM_HOOK_H_
