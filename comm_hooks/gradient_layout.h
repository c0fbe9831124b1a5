// How a gradient lies in the flat buffer of its bucket.
//
// Thread safety: pure.

#ifndef BRIGADE_COMM_HOOKS_GRADIENT_LAYOUT_H_
#define BRIGADE_COMM_HOOKS_GRADIENT_LAYOUT_H_

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace brigade {

// Of a parameter of these sizes and strides: its own strides if it covers its
// memory without gaps, else those of a contiguous tensor, put into `room`.
inline at::IntArrayRef gradient_strides(at::IntArrayRef sizes,
                                        at::IntArrayRef strides,
                                        bool is_non_overlapping_and_dense,
                                        at::DimVector& room) {
  if (is_non_overlapping_and_dense) return strides;
  room.assign(sizes.size(), 1);
  for (auto d = static_cast<int64_t>(sizes.size()) - 2; d >= 0; --d) {
    room[d] = room[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  }
  return room;
}

// The part of a flat buffer that holds the gradient of `parameter`, in the
// buffer's dtype. Shares its memory. REQUIRES: `flat` is 1D and contiguous.
inline at::Tensor gradient_in(const at::Tensor& flat, int64_t offset_numel,
                              const at::Tensor& parameter) {
  at::DimVector room;
  return flat.as_strided(
      parameter.sizes(),
      gradient_strides(parameter.sizes(), parameter.strides(),
                       parameter.is_non_overlapping_and_dense(), room),
      flat.storage_offset() + offset_numel);
}

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_GRADIENT_LAYOUT_H_
