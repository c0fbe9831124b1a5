#include "brigade/comm_hooks/comm_hooks.h"

#include <ATen/ops/view_as_complex.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm_hooks/gradient_layout.h"
#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {
namespace {

using Future = c10::ivalue::Future;

class FunctionHook final : public c10d::CommHookInterface,
                           public CommHookExtension {
 public:
  FunctionHook(CommHookFunction function, std::string name)
      : function_(std::move(function)), name_(std::move(name)) {}

  HookTraits traits() const override { return {.name = name_}; }

  HookFuturePtr runHook(c10d::GradBucket& bucket) override {
    return function_(bucket);
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return tensor_of_hook_result(result);
  }

 private:
  const CommHookFunction function_;
  const std::string name_;
};

// Complex buckets may come back as pairs of reals.
at::Tensor flat_result(const at::Tensor& result, const at::Tensor& parameter) {
  const at::Tensor flat = result.reshape({-1}).contiguous();
  if (!parameter.is_complex() || flat.is_complex()) return flat;
  return at::view_as_complex(flat.reshape({-1, 2}));
}

void step_all(const at::Tensor& result,
              const std::vector<at::Tensor>& parameters,
              const ParameterStep& step) {
  const at::NoGradGuard no_grad;
  const bool sparse = result.layout() != at::kStrided;
  const at::Tensor flat =
      sparse ? result : flat_result(result, parameters.front());
  int64_t offset_numel = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor gradient =
        sparse ? result : gradient_in(flat, offset_numel, parameter);
    offset_numel += parameter.numel();
    parameter.mutable_grad() = gradient.to(parameter.scalar_type());
    const auto free_gradient = c10::make_scope_exit(
        [&parameter] { parameter.mutable_grad().reset(); });
    step(parameter);
  }
}

// None, or what went wrong, as text. An error in the future itself would look
// like one of the network.
c10::IValue error_of_steps(const std::weak_ptr<c10d::CommHookInterface>& weak,
                           const c10::IValue& arrived,
                           const std::vector<at::Tensor>& parameters,
                           const ParameterStep& step) {
  try {
    const std::shared_ptr<c10d::CommHookInterface> hook = weak.lock();
    TORCH_CHECK(hook, "its hook is gone");
    const at::Tensor result = hook->parseHookResult(arrived);
    if (result.defined()) step_all(result, parameters, step);
    return {};
  } catch (...) {
    return message_of(std::current_exception());
  }
}

std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_of(
    const std::vector<at::Tensor>& tensors) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (const at::Tensor& tensor : tensors) {
    storages.push_back(tensor.storage().getWeakStorageImpl());
  }
  return storages;
}

class SteppingHook final : public WrappingHook {
 public:
  SteppingHook(CommHookPtr hook, ParameterStep step, ParameterFilter is_stepped)
      : WrappingHook(std::move(hook)),
        step_(std::move(step)),
        is_stepped_(std::move(is_stepped)) {}

  HookFuturePtr runHook(c10d::GradBucket& bucket) override {
    const bool steps = steps_parameters_of(bucket);
    const HookFuturePtr arrived = hook_->runHook(bucket);
    if (!arrived || !has_data_ || !steps) return arrived;
    // Whoever waits for the future also waits for what the steps wrote. The
    // hook is not owned: it may own a group, and would end on its thread.
    return arrived->then(
        [hook = std::weak_ptr(hook_), step = step_,
         parameters = bucket.getParameters()](Future& done) {
          c10::IValue error =
              error_of_steps(hook, done.value(), parameters, step);
          return std::tuple(std::move(error), storages_of(parameters));
        },
        c10::AnyType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    TORCH_CHECK(!result.isString(),
                "step_in_backward: a step threw: ", result.toStringRef());
    return result.isNone() ? at::Tensor() : hook_->parseHookResult(result);
  }

  HookTraits traits() const override {
    HookTraits traits = WrappingHook::traits();
    traits.takes_host_sums = traits_.takes_host_sums;
    traits.steps_parameters = true;
    return traits;
  }

  void take_host_sums(std::shared_ptr<HostSums> sums) override {
    traits_.host_sums->take_host_sums(std::move(sums));
  }

  void iteration_begins(bool has_data) override {
    has_data_ = has_data;
    WrappingHook::iteration_begins(has_data);
  }

 private:
  bool steps_parameters_of(const c10d::GradBucket& bucket) const {
    if (!is_stepped_) return true;
    const std::vector<at::Tensor> parameters = bucket.getParameters();
    const bool steps = is_stepped_(parameters.front());
    TORCH_CHECK(std::ranges::all_of(parameters,
                                    [&](const at::Tensor& parameter) {
                                      return is_stepped_(parameter) == steps;
                                    }),
                "step_in_backward: bucket ", bucket.getIndex(),
                " holds parameters that are stepped and others.\nGive a "
                "bucket_plan that keeps them apart.");
    return steps;
  }

  const ParameterStep step_;
  const ParameterFilter is_stepped_;  // null: all are
  bool has_data_ =
      true;  // a rank that has joined is given the model at the end
};

}  // namespace

CommHookPtr make_comm_hook(CommHookFunction function, std::string name) {
  TORCH_CHECK_VALUE(function, "make_comm_hook needs a function, got none");
  return std::make_shared<FunctionHook>(std::move(function), std::move(name));
}

CommHookPtr step_in_backward(CommHookPtr hook, ParameterStep step,
                             ParameterFilter is_stepped) {
  TORCH_CHECK_VALUE(hook,
                    "step_in_backward needs a comm hook, got null.\nGive it "
                    "all_reduce_hook(group).");
  TORCH_CHECK_VALUE(step, "step_in_backward needs a step, got none");
  return std::make_shared<SteppingHook>(std::move(hook), std::move(step),
                                        std::move(is_stepped));
}

}  // namespace brigade
