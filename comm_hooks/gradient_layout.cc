#include "brigade/comm_hooks/gradient_layout.h"

#include <algorithm>

namespace brigade {

at::DimVector gradient_strides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return at::DimVector(parameter.strides());
  }
  at::DimVector strides(parameter.dim(), 1);
  for (int64_t d = parameter.dim() - 2; d >= 0; --d) {
    strides[d] = strides[d + 1] * std::max<int64_t>(parameter.size(d + 1), 1);
  }
  return strides;
}

at::Tensor gradient_in(const at::Tensor& flat, int64_t offset_numel,
                       const at::Tensor& parameter) {
  return flat.as_strided(parameter.sizes(), gradient_strides(parameter),
                         flat.storage_offset() + offset_numel);
}

}  // namespace brigade
