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
  // which would be lost.
  template <typename Forward>
  auto run(ParameterCasts::Checkpoints checkpoints,
           const Forward& forward) const {
    const ParameterCasts::Scope scope(
        std::make_shared<ParameterCasts>(parameters_, dtype_, checkpoints));
    auto outputs = forward();
    require_unwritten(scope);
    return outputs;
  }

 private:
  void require_unwritten(const ParameterCasts::Scope& scope) const;

  std::vector<std::string> names_;
  std::vector<at::Tensor> parameters_;
  const at::ScalarType dtype_;
};

}  // namespace brigade

#endif  // BRIGADE_DDP_FORWARD_PRECISION_H_
