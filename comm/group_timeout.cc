#include "brigade/comm/group_timeout.h"

#include <algorithm>
#include <exception>

namespace brigade {

std::chrono::milliseconds group_timeout(c10d::ProcessGroup& group) {
  std::chrono::milliseconds shortest = kBackendDefaultTimeout;
  for (const c10::Device device : group.getDeviceTypes()) {
    try {
      shortest = std::min(
          shortest,
          group.getBackend(device.type())->getBackendOptions()->timeout);
    } catch (const std::exception&) {
      // This backend has no options to tell.
    }
  }
  return shortest;
}

}  // namespace brigade
