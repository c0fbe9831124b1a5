// Runs a module's forward in a lower precision than its parameters are kept in.
//
// Thread safety: one call at a time.

#ifndef BRIGADE_DDP_FORWARD_PRECISION_H_
#define BRIGADE_DDP_FORWARD_PRECISION_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "brigade/ddp/module_tensors.h"
#include "brigade/hooks/parameter_casts.h"

namespace brigade {

class ForwardPrecision {
 public:
  ForwardPrecision(const std::vector<NamedTensor>& parameters,
                   at::ScalarType dtype);

  at::ScalarType dtype() const { return dtype_; }

  // What `forward` returns. While it runs, parameters hold copies: see
  // parameter_casts.h.
  //
  // Errors: what `forward` throws; RuntimeError if it writes to a parameter,
  // which would be lost, or freezes or unfreezes one; and from checkpoint()
  // inside of it, if an optimizer `steps_in_backward` or parameters are on
  // several devices, whose backwards run on threads of their own.
  template <typename Forward>
  auto run(bool steps_in_backward, const Forward& forward) const {
    const ParameterCasts::Scope scope(casts(steps_in_backward));
    auto outputs = forward();
    require_unchanged(scope);
    return outputs;
  }

 private:
  std::shared_ptr<const ParameterCasts> casts(bool steps_in_backward) const;
  void require_unchanged(const ParameterCasts::Scope& scope) const;

  const at::ScalarType dtype_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  bool spans_devices_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_FORWARD_PRECISION_H_
