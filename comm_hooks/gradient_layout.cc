#include "brigade/comm_hooks/gradient_layout.h"

#include <algorithm>

namespace brigade {

at::IntArrayRef gradient_strides(at::IntArrayRef sizes, at::IntArrayRef strides,
                                 bool is_non_overlapping_and_dense,
                                 at::DimVector& room) {
  if (is_non_overlapping_and_dense) return strides;
  room.assign(sizes.size(), 1);
  for (auto d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
    room[d] = room[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  }
  return room;
}

at::Tensor gradient_in(const at::Tensor& flat, int64_t offset_numel,
                       const at::Tensor& parameter) {
  at::DimVector room;
  return flat.as_strided(
      parameter.sizes(),
      gradient_strides(parameter.sizes(), parameter.strides(),
                       parameter.is_non_overlapping_and_dense(), room),
      flat.storage_offset() + offset_numel);
}

}  // namespace brigade
