#include "brigade/python_bindings/python_stepping_hook.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/python_bindings/exit_wait.h"

namespace brigade {
namespace {

namespace py = pybind11;

class PythonSteppingHook final : public WrappingHook {
 public:
  using WrappingHook::WrappingHook;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    auto stepped = hook_->runHook(bucket);
    if (stepped) wait_for_at_exit(stepped);
    return stepped;
  }
};

}  // namespace

ParameterStep python_step(py::object step) {
  // The last copy of the functor may go on any thread.
  const std::shared_ptr<py::object> shared(new py::object(std::move(step)),
                                           [](py::object* object) {
                                             const py::gil_scoped_acquire gil;
                                             delete object;
                                           });
  return [shared](const at::Tensor& parameter) {
    const py::gil_scoped_acquire gil;
    (*shared)(parameter);
  };
}

std::shared_ptr<c10d::CommHookInterface> python_stepping_hook(
    std::shared_ptr<c10d::CommHookInterface> hook, ParameterStep step,
    ParameterFilter is_stepped) {
  return std::make_shared<PythonSteppingHook>(step_in_backward(
      std::move(hook), std::move(step), std::move(is_stepped)));
}

}  // namespace brigade
