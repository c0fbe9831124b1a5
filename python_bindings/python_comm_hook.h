// A comm hook written in Python: a callable that gets a state and a
// torch.distributed.GradBucket and returns a torch.futures.Future of a tensor.
//
// What the hook returns is c10d's business; this adds that what it raises is
// raised by backward, the same object.
//
// Thread safety: may be called on any thread; takes the GIL itself. The caller
// may hold the reducer's lock, but not the GIL while it waits for that lock.

#ifndef BRIGADE_PYTHON_BINDINGS_PYTHON_COMM_HOOK_H_
#define BRIGADE_PYTHON_BINDINGS_PYTHON_COMM_HOOK_H_

#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <string>
#include <utility>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/python_bindings/exit_wait.h"

namespace brigade {

class PythonCommHook final : public c10d::PythonCommHook,
                             public CommHookExtension {
 public:
  PythonCommHook(py::object state, py::object hook, std::string name)
      : c10d::PythonCommHook(std::move(state), std::move(hook)),
        name_(std::move(name)) {}

  std::string hook_name() const override { return name_; }
  bool throws_own_errors() const override { return true; }

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    auto future = c10d::PythonCommHook::runHook(bucket);
    if (future) wait_for_at_exit(future);
    return future;
  }

  // A collective's own future holds a list of tensors, which c10d refuses.
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return result.isPyObject() ? c10d::PythonCommHook::parseHookResult(result)
                               : tensor_of_hook_result(result);
  }

 private:
  const std::string name_;
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_PYTHON_COMM_HOOK_H_
