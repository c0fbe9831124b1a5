// Makes simulated devices the accelerator of this process: "sim:0", "sim:1" and
// so on are devices like any other, with streams, events, pinned memory and
// autograd.
//
// They come before CUDA, which this process can't use then: tests on them are a
// binary of their own.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_INSTALL_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_INSTALL_H_

namespace brigade::simulated {

// Once, before the first backward of the process, also of one on the CPU.
void install(int num_devices);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_INSTALL_H_
