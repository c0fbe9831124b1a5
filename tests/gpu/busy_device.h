// Keeps a CUDA device busy before the work that a test launches.

#ifndef BRIGADE_TESTS_GPU_BUSY_DEVICE_H_
#define BRIGADE_TESTS_GPU_BUSY_DEVICE_H_

#include <ATen/ATen.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace brigade::testing {

inline const at::Device kDevice(at::kCUDA, 0);

inline c10::Stream current_stream() {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(kDevice);
}

// Enqueues seconds of work on the current stream.
inline void keep_busy() {
  const at::Tensor matrix = at::ones({8192, 8192}, kDevice);
  at::Tensor product = at::empty_like(matrix);
  for (int i = 0; i < 60; ++i) at::mm_out(product, matrix, matrix);
}

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_GPU_BUSY_DEVICE_H_
