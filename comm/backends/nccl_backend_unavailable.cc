// Replaces nccl_backend.cc in builds without CUDA.

#include <c10/util/Exception.h>

#include "brigade/comm/backends/device_backend.h"

namespace brigade {

void select_cuda_device(int) {
  TORCH_CHECK(false,
              "a process group for CUDA tensors: brigade was built without "
              "CUDA.\nBuild it with BRIGADE_CUDA=ON, or use "
              "ProcessGroupOptions{.device_type = at::kCPU}.");
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendPlace&) {
  select_cuda_device(0);  // throws
  return nullptr;
}

}  // namespace brigade
