#include "brigade/comm/backends/nccl2_backend.h"

#include <c10/cuda/CUDAFunctions.h>

#include <cstdlib>
#include <string_view>
#include <torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>

namespace brigade {

c10::intrusive_ptr<c10d::Backend> make_nccl2_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, const std::string& group_name) {
  const char* wish = std::getenv("TORCH_DIST_USE_NCCL2");
  if (wish && std::string_view(wish) == "0") return nullptr;
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->group_name = group_name;
  options->lazy_init = true;
  auto backend = c10::make_intrusive<c10d::nccl2::ProcessGroupNCCL>(
      store, rank, world_size, options);
  backend->setBoundDeviceId(at::Device(at::kCUDA, c10::cuda::current_device()));
  return backend;
}

}  // namespace brigade
