#include "brigade/comm/backends/nccl_backend.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "brigade/comm/backends/nccl2_backend.h"

namespace brigade {

void select_cuda_device(int local_rank) {
  const int num_devices = c10::cuda::device_count();
  TORCH_CHECK_VALUE(
      local_rank >= 0 && local_rank < num_devices, "local rank ", local_rank,
      " needs CUDA device ", local_rank, ", but this machine shows ",
      num_devices,
      " of them. Start at most one rank per GPU, check CUDA_VISIBLE_DEVICES, "
      "or use ProcessGroupOptions{.device_type = at::kCPU}.");
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(local_rank));
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
    std::chrono::milliseconds timeout, const std::string& group_name) {
  TORCH_CHECK(c10::cuda::device_count() > 0,
              "a process group for CUDA tensors needs a GPU, and this machine "
              "shows none. Check CUDA_VISIBLE_DEVICES, or use "
              "ProcessGroupOptions{.device_type = at::kCPU}.");
  if (auto backend =
          make_nccl2_backend(store, rank, world_size, timeout, group_name)) {
    return backend;
  }
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->group_name = group_name;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, world_size,
                                                     options);
}

}  // namespace brigade
