// Tensors on simulated devices, and what kernels see of them.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_TENSORS_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_TENSORS_H_

#include <ATen/core/Tensor.h>

#include "brigade/tests/support/simulated_device/simulation.h"

namespace brigade::simulated {

bool is_on_device(const at::Tensor& tensor);

// From its first element to its last, gaps between strides too. REQUIRES:
// is_on_device().
KernelAccess access_to(const at::Tensor& tensor, bool writes);

// A tensor of the CPU over the same memory: for kernels only. REQUIRES:
// is_on_device().
at::Tensor for_kernels(const at::Tensor& tensor);

// Uninitialized, on the calling thread's current stream of `device`.
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides,
                           at::ScalarType dtype, c10::Device device);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_TENSORS_H_
