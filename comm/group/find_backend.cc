#include "brigade/comm/group/find_backend.h"

#include <exception>

namespace brigade {

c10::intrusive_ptr<c10d::Backend> find_backend(c10d::ProcessGroup& group,
                                               c10::DeviceType device_type) {
  try {
    return group.getBackend(device_type);
  } catch (const std::exception&) {
    return nullptr;
  }
}

bool is_over_gloo(c10d::ProcessGroup& group, c10::DeviceType device_type) {
  const auto backend = find_backend(group, device_type);
  return backend && backend->getBackendName() == "gloo";
}

}  // namespace brigade
