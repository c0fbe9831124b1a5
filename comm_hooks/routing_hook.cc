#include "brigade/comm_hooks/routing_hook.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {
namespace {

// Does by hand what the reducer does while it packs for one hook. The buffer of
// complex gradients holds reals.
void apply_wire_format(const CommHookExtension& declared,
                       c10d::GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  at::Tensor& buffer = bucket.getBufferRef();
  const at::ScalarType dtype = bucket.getParameters().front().scalar_type();
  const bool as_reals = c10::isComplexType(dtype) && !buffer.is_complex();
  const WireFormat format = declared.wire_format(dtype);
  buffer.mul_(format.scale);
  buffer =
      buffer.to(as_reals ? c10::toRealValueType(format.dtype) : format.dtype);
}

}  // namespace

RoutingHook::RoutingHook(HookPtr hook, std::vector<Route> routes) {
  hooks_.push_back(std::move(hook));
  for (Route& route : routes) {
    for (const at::Tensor& parameter : route.parameters) {
      route_of_[parameter.unsafeGetTensorImpl()] = hooks_.size();
    }
    hooks_.push_back(std::move(route.hook));
  }
  for (const HookPtr& each : hooks_) {
    TORCH_CHECK_VALUE(each,
                      "RoutingHook needs a comm hook per route, got null");
    traits_.push_back(traits_of(*each));
  }
}

size_t RoutingHook::route_of(const at::Tensor& parameter) const {
  const auto found = route_of_.find(parameter.unsafeGetTensorImpl());
  return found == route_of_.end() ? 0 : found->second;
}

size_t RoutingHook::route_of(const c10d::GradBucket& bucket) const {
  const std::vector<at::Tensor> parameters = bucket.getParameters();
  const size_t route = route_of(parameters.front());
  for (const at::Tensor& parameter : parameters) {
    TORCH_CHECK(route_of(parameter) == route, "RoutingHook: bucket ",
                bucket.getIndex(),
                " holds parameters of several routes.\nGive a bucket_plan that "
                "keeps them apart, and rebuild_buckets = false.");
  }
  return route;
}

c10::intrusive_ptr<c10::ivalue::Future> RoutingHook::runHook(
    c10d::GradBucket& bucket) {
  const size_t route = route_of(bucket);
  const HookPtr& hook = hooks_[route];
  if (const CommHookExtension* declared = traits_[route].wire_format) {
    apply_wire_format(*declared, bucket);
  }
  const auto arrived = hook->runHook(bucket);
  if (!arrived) return arrived;
  // The hook is not owned: it may own a group, and would end on its thread.
  return arrived->then(
      [weak = std::weak_ptr(hook)](c10::ivalue::Future& done) -> c10::IValue {
        const HookPtr hook = weak.lock();
        TORCH_CHECK(hook, "RoutingHook: the hook of a bucket is gone");
        const at::Tensor result = hook->parseHookResult(done.value());
        return result.defined() ? c10::IValue(result) : c10::IValue();
      },
      c10::AnyType::get());
}

at::Tensor RoutingHook::parseHookResult(const c10::IValue& result) {
  return tensor_of_hook_result(result);
}

void RoutingHook::iteration_begins(bool has_data) {
  for (const HookTraits& hook : traits_) {
    if (hook.listener) hook.listener->iteration_begins(has_data);
  }
}

HookTraits RoutingHook::traits() const {
  return {.steps_parameters =
              std::ranges::any_of(traits_, &HookTraits::steps_parameters)};
}

}  // namespace brigade
