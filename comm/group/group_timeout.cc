#include "brigade/comm/group/group_timeout.h"

#include <algorithm>
#include <exception>
#include <optional>

#include "brigade/comm/group/per_group.h"

namespace brigade {

namespace {

struct RememberedTimeout {
  std::chrono::milliseconds timeout = kBackendDefaultTimeout;
};

std::chrono::milliseconds remembered_timeout(const c10d::ProcessGroup& group) {
  const auto remembered = find_per_group<RememberedTimeout>(group);
  return remembered ? remembered->timeout : kBackendDefaultTimeout;
}

}  // namespace

void remember_timeout(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      std::chrono::milliseconds timeout) {
  per_group<RememberedTimeout>(group)->timeout = timeout;
}

std::chrono::milliseconds group_timeout(c10d::ProcessGroup& group) {
  std::optional<std::chrono::milliseconds> shortest;
  for (const c10::Device device : group.getDeviceTypes()) {
    try {
      const std::chrono::milliseconds timeout =
          group.getBackend(device.type())->getBackendOptions()->timeout;
      shortest = std::min(shortest.value_or(kBackendDefaultTimeout), timeout);
    } catch (const std::exception&) {
      // This backend has no options to tell.
    }
  }
  return shortest ? *shortest : remembered_timeout(group);
}

}  // namespace brigade
