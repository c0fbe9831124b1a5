// A comm hook that chooses another one by the bucket's parameters.
//
// Thread safety: as the hooks that it calls.

#ifndef BRIGADE_COMM_HOOKS_ROUTING_HOOK_H_
#define BRIGADE_COMM_HOOKS_ROUTING_HOOK_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>
#include <vector>

#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {

struct Route {
  std::vector<at::Tensor> parameters;
  std::shared_ptr<c10d::CommHookInterface> hook;
};

// Parameters of no route go by the first hook. A bucket that holds parameters
// of several routes is an error: give the reducer a bucket_plan, and
// rebuild_buckets = false. A wire format costs one more pass over the bucket.
class RoutingHook final : public c10d::CommHookInterface,
                          public CommHookExtension {
 public:
  // Errors: ValueError if a hook is null.
  RoutingHook(std::shared_ptr<c10d::CommHookInterface> hook,
              std::vector<Route> routes);

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;
  HookTraits traits() const override;
  void iteration_begins(bool has_data) override;

 private:
  using HookPtr = std::shared_ptr<c10d::CommHookInterface>;

  size_t route_of(const at::Tensor& parameter) const;  // into hooks_
  size_t route_of(const c10d::GradBucket& bucket) const;

  std::vector<HookPtr> hooks_;      // the first one serves what has no route
  std::vector<HookTraits> traits_;  // of each
  std::unordered_map<const c10::TensorImpl*, size_t> route_of_;  // into hooks_
};

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_ROUTING_HOOK_H_
