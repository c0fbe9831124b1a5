#include "brigade/comm_hooks/gradient_layout.h"

#include <algorithm>

namespace brigade {

at::IntArrayRef gradient_strides(const at::Tensor& parameter,
                                 at::DimVector& room) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides();
  room.assign(parameter.dim(), 1);
  for (int64_t d = parameter.dim() - 2; d >= 0; --d) {
    room[d] = room[d + 1] * std::max<int64_t>(parameter.size(d + 1), 1);
  }
  return room;
}

at::Tensor gradient_in(const at::Tensor& flat, int64_t offset_numel,
                       const at::Tensor& parameter) {
  at::DimVector room;
  return flat.as_strided(parameter.sizes(), gradient_strides(parameter, room),
                         flat.storage_offset() + offset_numel);
}

}  // namespace brigade
