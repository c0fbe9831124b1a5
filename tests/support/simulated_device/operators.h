// Operators of simulated devices. Those that make tensors, views and copies
// have their own kernels; all others run the CPU's kernels on device memory.
// There are no kernels for sparse tensors and random numbers.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_OPERATORS_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_OPERATORS_H_

namespace brigade::simulated {

// Call it once, before the first tensor is made.
void register_operators();

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_OPERATORS_H_
