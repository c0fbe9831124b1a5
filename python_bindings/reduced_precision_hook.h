// A comm hook whose buckets hold raw gradients in a dtype of the caller's
// choice instead of the parameters': the hook of torch's native mixed
// precision.
//
// Thread safety: as the hook inside.

#ifndef BRIGADE_PYTHON_BINDINGS_REDUCED_PRECISION_HOOK_H_
#define BRIGADE_PYTHON_BINDINGS_REDUCED_PRECISION_HOOK_H_

#include <memory>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "brigade/comm_hooks/hook_traits.h"

namespace brigade {

class ReducedPrecisionHook final : public WrappingHook {
 public:
  // REQUIRES: `hook` is not null, `dtype` is a floating-point one.
  ReducedPrecisionHook(std::shared_ptr<c10d::CommHookInterface> hook,
                       at::ScalarType dtype)
      : WrappingHook(std::move(hook)), dtype_(dtype) {}

  // Gradients that are no real numbers stay what they are.
  WireFormat wire_format(at::ScalarType gradient_dtype) const override {
    return {.dtype =
                c10::isFloatingType(gradient_dtype) ? dtype_ : gradient_dtype};
  }
  bool sums_in_order() const override { return false; }
  bool throws_own_errors() const override { return true; }

 private:
  const at::ScalarType dtype_;
};

}  // namespace brigade

#endif  // BRIGADE_PYTHON_BINDINGS_REDUCED_PRECISION_HOOK_H_
