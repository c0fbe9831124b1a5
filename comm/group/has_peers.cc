#include "brigade/comm/group/has_peers.h"

#include "brigade/comm/group/find_backend.h"

namespace brigade {

bool has_peers(c10d::ProcessGroup& group) {
  if (group.getSize() == 1 || !group.getStore()) return false;
  const auto backend = find_backend(group, at::kCPU);
  return !backend || backend->getBackendName() != "fake";
}

}  // namespace brigade
