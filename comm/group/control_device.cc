#include "brigade/comm/group/control_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <vector>

#include "brigade/comm/group/per_group.h"

namespace brigade {
namespace {

struct SuggestedDevice {
  std::mutex mutex;
  std::optional<c10::Device> device;  // guarded by `mutex`
};

}  // namespace

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
  if (const auto suggested = find_per_group<SuggestedDevice>(group)) {
    const std::lock_guard<std::mutex> lock(suggested->mutex);
    if (suggested->device) return *suggested->device;
  }
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

void suggest_control_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            c10::Device device) {
  const std::vector<c10::Device> served = group->getDeviceTypes();
  if (served.empty() || served.front().type() != device.type() ||
      control_device(*group).is_cpu()) {
    return;
  }
  const auto suggested = per_group<SuggestedDevice>(group);
  const std::lock_guard<std::mutex> lock(suggested->mutex);
  if (!suggested->device) suggested->device = device;
}

}  // namespace brigade
