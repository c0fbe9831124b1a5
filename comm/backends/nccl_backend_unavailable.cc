// In place of nccl_backend.cc, in builds without CUDA.

#include <c10/util/Exception.h>

#include "brigade/comm/backends/device_backend.h"

namespace brigade {
namespace {

[[noreturn]] void throw_built_without_cuda() {
  TORCH_CHECK(false,
              "a process group for CUDA tensors was asked for, but brigade was "
              "built without CUDA. Build it with BRIGADE_CUDA=ON, or use "
              "ProcessGroupOptions{.device_type = at::kCPU}.");
}

}  // namespace

void select_cuda_device(int) { throw_built_without_cuda(); }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendPlace&) {
  throw_built_without_cuda();
}

}  // namespace brigade
