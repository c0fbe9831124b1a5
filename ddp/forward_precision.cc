#include "brigade/ddp/forward_precision.h"

#include <c10/util/Exception.h>

namespace brigade {

ForwardPrecision::ForwardPrecision(const std::vector<NamedTensor>& parameters,
                                   at::ScalarType dtype)
    : dtype_(dtype) {
  for (const auto& [name, tensor] : parameters) {
    names_.push_back(name);
    parameters_.push_back(tensor);
  }
}

void ForwardPrecision::require_unwritten(
    const ParameterCasts::Scope& scope) const {
  const std::optional<size_t> place = scope.first_written();
  TORCH_CHECK(!place, "mixed_precision: parameter ", names_[place.value_or(0)],
              " was written in forward, where it is a copy in ", dtype_,
              ": the value would be lost.\nWrite to parameters outside of "
              "forward.");
}

}  // namespace brigade
