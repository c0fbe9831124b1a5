#include "brigade/python_bindings/python_stepping_hook.h"

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

#include "brigade/comm_hooks/hook_name.h"
#include "brigade/comm_hooks/iteration_listener.h"
#include "brigade/comm_hooks/own_errors.h"
#include "brigade/comm_hooks/wire_format.h"
#include "brigade/python_bindings/exit_wait.h"

namespace brigade {
namespace {

namespace py = pybind11;

class PythonSteppingHook : public c10d::CommHookInterface,
                           public DeclaresWireFormat,
                           public HasHookName,
                           public IterationListener {
 public:
  explicit PythonSteppingHook(std::shared_ptr<c10d::CommHookInterface> hook)
      : hook_(std::move(hook)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    auto stepped = hook_->runHook(bucket);
    if (stepped) wait_for_at_exit(stepped);
    return stepped;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return hook_->parseHookResult(result);
  }

  WireFormat wire_format(at::ScalarType gradient_dtype) const override {
    return dynamic_cast<const DeclaresWireFormat&>(*hook_).wire_format(
        gradient_dtype);
  }

  bool fails_by_network_only() const override {
    return brigade::fails_by_network_only(*hook_);
  }

  std::string hook_name() const override { return name_of(*hook_); }

  void iteration_begins(bool has_data) override {
    dynamic_cast<IterationListener&>(*hook_).iteration_begins(has_data);
  }

 private:
  const std::shared_ptr<c10d::CommHookInterface> hook_;
};

class BehindAHookWithOwnErrors final : public PythonSteppingHook,
                                       public ThrowsOwnErrors {
 public:
  using PythonSteppingHook::PythonSteppingHook;
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
  const bool has_own_errors =
      dynamic_cast<const ThrowsOwnErrors*>(hook.get()) != nullptr;
  auto stepping =
      step_in_backward(std::move(hook), std::move(step), std::move(is_stepped));
  if (has_own_errors) {
    return std::make_shared<BehindAHookWithOwnErrors>(std::move(stepping));
  }
  return std::make_shared<PythonSteppingHook>(std::move(stepping));
}

}  // namespace brigade
