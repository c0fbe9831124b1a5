// A comm hook whose buckets hold raw gradients in a dtype of the caller's
// choice instead of the parameters': the hook of torch's native mixed
// precision.
//
// Thread safety: as the hook inside.

#ifndef BRIGADE_PYTHON_BINDINGS_REDUCED_PRECISION_HOOK_H_
#define BRIGADE_PYTHON_BINDINGS_REDUCED_PRECISION_HOOK_H_

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {

class ReducedPrecisionHook final : public c10d::CommHookInterface,
                                   public DeclaresWireFormat,
                                   public ThrowsOwnErrors,
                                   public HasHookName {
 public:
  // REQUIRES: `hook` is not null, `dtype` is a floating-point one.
  ReducedPrecisionHook(std::shared_ptr<c10d::CommHookInterface> hook,
                       at::ScalarType dtype)
      : hook_(std::move(hook)), traits_(traits_of(*hook_)), dtype_(dtype) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    return hook_->runHook(bucket);
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return hook_->parseHookResult(result);
  }
  // Gradients that are no real numbers stay what they are.
  WireFormat wire_format(at::ScalarType gradient_dtype) const override {
    return {.dtype =
                c10::isFloatingType(gradient_dtype) ? dtype_ : gradient_dtype};
  }

  std::string hook_name() const override { return traits_.name; }

  bool fails_by_network_only() const override {
    return traits_.fails_by_network_only;
  }

 private:
  const std::shared_ptr<c10d::CommHookInterface> hook_;
  const HookTraits traits_;  // of hook_
  const at::ScalarType dtype_;
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REDUCED_PRECISION_HOOK_H_
