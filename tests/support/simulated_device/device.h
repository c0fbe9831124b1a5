// Simulated devices as the accelerator of this process: "sim:0", "sim:1", ...
// with streams, events, pinned memory and autograd.
//
// They replace CUDA in this process, so tests on them need a separate binary.
//
// Thread safety: any thread; current devices and streams are per thread.

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_H_

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace brigade::simulated {

// Call it once, before the first backward of the process (also on CPUs).
void install(int num_devices);

// Returns the calling thread's current stream. `device` without an index: the
// current device.
c10::Stream current_stream(c10::Device device);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_DEVICE_H_
