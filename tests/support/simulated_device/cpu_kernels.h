// Any operator of ATen as a kernel of a simulated device: the CPU's, over the
// same memory. What it reads and writes is read off its schema.
//
// An operator whose result shares memory with its arguments needs a kernel of
// its own (operators.h); so do sparse tensors and random numbers, for which
// there is nothing.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_CPU_KERNELS_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_CPU_KERNELS_H_

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace brigade::simulated {

// Errors: NotImplementedError if it returns a view; RuntimeError if its tensors
// are on several devices.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_CPU_KERNELS_H_
