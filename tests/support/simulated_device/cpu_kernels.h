// Tensors as kernels of simulated devices see them, and any operator of ATen as
// such a kernel: the CPU's, over the same memory. Its schema says what it reads
// and writes.
//
// An operator whose result shares memory with its arguments needs a kernel of
// its own (operators.h); so do sparse tensors and random numbers, for which
// there is nothing.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_CPU_KERNELS_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_CPU_KERNELS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

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

// Errors: NotImplementedError if it returns a view; RuntimeError if its tensors
// are on several devices.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_CPU_KERNELS_H_
