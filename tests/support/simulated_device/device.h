// Simulated devices as the accelerator of this process: "sim:0", "sim:1" and so
// on are devices like any other, with streams, events, pinned memory and
// autograd.
//
// They come before CUDA, which this process can't use then: tests on them are a
// binary of their own.
//
// Thread safety: any thread; current devices and streams are a thread's own.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace brigade::simulated {

// To be called once, before the first backward of the process, CPU backwards
// included.
void install(int num_devices);

// The calling thread's. `device` without an index: its current one.
c10::Stream current_stream(c10::Device device);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_H_
