// The operators of simulated devices: those that make tensors, views and copies
// are written here, all others are the CPU's (cpu_kernels.h).

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_OPERATORS_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_OPERATORS_H_

namespace brigade::simulated {

// Once, before the first tensor.
void register_operators();

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_OPERATORS_H_
