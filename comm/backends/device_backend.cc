#include "brigade/comm/backends/device_backend.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

struct RememberedMakeBackend {
  c10::DeviceType type = c10::kCPU;
  MakeBackend make = nullptr;
};

}  // namespace

void select_device(c10::DeviceType type, int local_rank) {
  if (type == c10::kCPU) return;
  if (type == c10::kCUDA) return select_cuda_device(local_rank);
  TORCH_CHECK_VALUE(c10::impl::hasDeviceGuardImpl(type),
                    "ProcessGroupOptions::device_type: expected a type whose "
                    "library is linked into this program, found ",
                    type, ".\nLink the vendor's library.");
  const c10::impl::VirtualGuardImpl devices(type);
  TORCH_CHECK_VALUE(local_rank >= 0 && local_rank < devices.deviceCount(),
                    "local rank ", local_rank, ": expected ", type, " device ",
                    local_rank, ", found ",
                    static_cast<int>(devices.deviceCount()),
                    " devices on this machine.\nStart at most one rank per "
                    "device.");
  devices.setDevice({type, static_cast<c10::DeviceIndex>(local_rank)});
}

void remember_make_backend(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                           c10::DeviceType type, const MakeBackend& make) {
  if (make) {
    *per_group<RememberedMakeBackend>(group) = {.type = type, .make = make};
  }
}

MakeBackend find_make_backend(const c10d::ProcessGroup& group,
                              c10::DeviceType type) {
  const auto found = find_per_group<RememberedMakeBackend>(group);
  return found && found->type == type ? found->make : nullptr;
}

}  // namespace brigade
