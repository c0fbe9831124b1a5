// How a gradient lies in the flat buffer of its bucket.
//
// Thread safety: pure.

#ifndef BRIGADE_COMM_HOOKS_GRADIENT_LAYOUT_H_
#define BRIGADE_COMM_HOOKS_GRADIENT_LAYOUT_H_

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace brigade {

// Of a parameter of these sizes and strides: its own strides if it covers its
// memory without gaps, else those of a contiguous tensor, put into `room`.
at::IntArrayRef gradient_strides(at::IntArrayRef sizes, at::IntArrayRef strides,
                                 bool is_non_overlapping_and_dense,
                                 at::DimVector& room);

// The part of a flat buffer that holds the gradient of `parameter`, in the
// buffer's dtype. Shares its memory. REQUIRES: `flat` is 1D and contiguous.
at::Tensor gradient_in(const at::Tensor& flat, int64_t offset_numel,
                       const at::Tensor& parameter);

}  // namespace brigade

#endif  // BRIGADE_COMM_HOOKS_GRADIENT_LAYOUT_H_
