#include <c10/util/Exception.h>

#include "brigade/comm/backends/nccl_backend.h"

namespace brigade {
namespace {

constexpr const char* kUnavailable =
    "a process group for CUDA tensors was asked for, but brigade was built "
    "without CUDA. Build it with BRIGADE_CUDA=ON, or use "
    "ProcessGroupOptions{.device_type = at::kCPU}.";

}  // namespace

void select_cuda_device(int) { TORCH_CHECK(false, kUnavailable); }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>&, int, int, std::chrono::milliseconds,
    const std::string&) {
  TORCH_CHECK(false, kUnavailable);
}

}  // namespace brigade
