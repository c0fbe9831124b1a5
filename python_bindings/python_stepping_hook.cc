#include "brigade/python_bindings/python_stepping_hook.h"

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>

#include "brigade/comm_hooks/hook_traits.h"
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
      : hook_(std::move(hook)), traits_(traits_of(*hook_)) {}

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
    return traits_.wire_format->wire_format(gradient_dtype);
  }

  bool fails_by_network_only() const override {
    return traits_.fails_by_network_only;
  }

  bool sums_in_order() const override { return traits_.sums_in_order; }

  std::string hook_name() const override { return traits_.name; }

  void iteration_begins(bool has_data) override {
    traits_.listener->iteration_begins(has_data);
  }

 private:
  const std::shared_ptr<c10d::CommHookInterface> hook_;  // steps in backward
  const HookTraits traits_;                              // of hook_
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
  const bool has_own_errors = traits_of(*hook).throws_own_errors;
  auto stepping =
      step_in_backward(std::move(hook), std::move(step), std::move(is_stepped));
  if (has_own_errors) {
    return std::make_shared<BehindAHookWithOwnErrors>(std::move(stepping));
  }
  return std::make_shared<PythonSteppingHook>(std::move(stepping));
}

}  // namespace brigade
