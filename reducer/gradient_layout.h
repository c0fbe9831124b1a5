// What a gradient is, and whether that is what its parameter's must be.

#ifndef BRIGADE_REDUCER_GRADIENT_LAYOUT_H_
#define BRIGADE_REDUCER_GRADIENT_LAYOUT_H_

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "brigade/reducer/parameter_table.h"

namespace brigade {

// True if `tensor` is of these sizes and lays out its elements so. Strides of
// dimensions of size 1 do not matter.
inline bool is_laid_out_as(const at::Tensor& tensor, at::IntArrayRef sizes,
                           at::IntArrayRef strides) {
  const at::IntArrayRef own_sizes = tensor.sizes();
  const at::IntArrayRef own_strides = tensor.strides();
  if (own_sizes.size() != sizes.size()) return false;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (own_sizes[d] != sizes[d]) return false;
    if (sizes[d] > 1 && own_strides[d] != strides[d]) return false;
  }
  return true;
}

// True if both have elements of one dtype on one device, and nothing special
// about them: no other layout, no lazy conjugation, no subclass.
inline bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.key_set() == b.key_set() && a.dtype() == b.dtype() &&
         a.device() == b.device();
}

// Errors: RuntimeError that names the parameter if its gradient is not dense,
// or not of its dtype, shape and device.
void check_gradient(const ParameterTable& table, size_t parameter,
                    const at::Tensor& gradient);

}  // namespace brigade

#endif  // BRIGADE_REDUCER_GRADIENT_LAYOUT_H_
