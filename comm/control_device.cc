#include "brigade/comm/control_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <vector>

namespace brigade {

bool supports_device(const c10d::ProcessGroup& group, c10::DeviceType type) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  return devices.empty() ||
         std::any_of(devices.begin(), devices.end(),
                     [type](c10::Device d) { return d.type() == type; });
}

c10::Device control_device(const c10d::ProcessGroup& group) {
  if (supports_device(group, c10::kCPU)) return c10::kCPU;
  if (group.getBoundDeviceId().has_value()) return *group.getBoundDeviceId();
  const c10::DeviceType type = group.getDeviceTypes().front().type();
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

}  // namespace brigade
