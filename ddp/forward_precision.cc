#include "brigade/ddp/forward_precision.h"

#include <c10/util/Exception.h>

namespace brigade {

ForwardPrecision::ForwardPrecision(const std::vector<NamedTensor>& parameters,
                                   at::ScalarType dtype)
    : dtype_(dtype) {
  for (const auto& [name, tensor] : parameters) {
    names_.push_back(name);
    parameters_.push_back(tensor);
    if (tensor.device() != parameters_.front().device()) spans_devices_ = true;
  }
}

std::shared_ptr<const ParameterCasts> ForwardPrecision::casts(
    bool steps_in_backward) const {
  return std::make_shared<ParameterCasts>(
      parameters_, dtype_,
      steps_in_backward || spans_devices_
          ? ParameterCasts::Checkpoints::kRefused
          : ParameterCasts::Checkpoints::kAllowed);
}

void ForwardPrecision::require_unchanged(
    const ParameterCasts::Scope& scope) const {
  const std::optional<size_t> place = scope.first_changed();
  TORCH_CHECK(!place, "mixed_precision: parameter ", names_[place.value_or(0)],
              " was written, frozen or unfrozen in forward, where it is a copy "
              "in ",
              dtype_,
              " that forward's end throws away.\nChange parameters outside of "
              "forward.");
}

}  // namespace brigade
