#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <torch/version.h>

#include <cstdlib>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
#include <torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>
#define BRIGADE_HAS_NCCL2
#endif

#include "brigade/comm/backends/device_backend.h"

namespace brigade {

void select_cuda_device(int local_rank) {
  const int num_devices = c10::cuda::device_count();
  TORCH_CHECK_VALUE(
      local_rank >= 0 && local_rank < num_devices, "local rank ", local_rank,
      ": expected CUDA device ", local_rank, ", found ", num_devices,
      " devices on this machine.\nStart at most one rank per GPU, check "
      "CUDA_VISIBLE_DEVICES, or use "
      "ProcessGroupOptions{.device_type = at::kCPU}.");
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(local_rank));
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendPlace& place) {
  TORCH_CHECK(c10::cuda::device_count() > 0,
              "a process group for CUDA tensors needs a GPU, found none on "
              "this machine.\nCheck CUDA_VISIBLE_DEVICES, or use "
              "ProcessGroupOptions{.device_type = at::kCPU}.");
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = place.timeout;
  options->group_name = place.group_name;
#ifdef BRIGADE_HAS_NCCL2
  // The choice of torch's Python for "nccl".
  const char* const choice = std::getenv("TORCH_DIST_USE_NCCL2");
  if (choice == nullptr || std::string_view(choice) != "0") {
    options->lazy_init = true;
    auto backend = c10::make_intrusive<c10d::nccl2::ProcessGroupNCCL>(
        place.store, place.rank, place.world_size, options);
    backend->setBoundDeviceId(
        at::Device(at::kCUDA, c10::cuda::current_device()));
    return backend;
  }
#endif
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(place.store, place.rank,
                                                     place.world_size, options);
}

}  // namespace brigade
