#include "brigade/comm/collective_count.h"

#include <exception>
#include <set>

#include "brigade/comm/ordered/host_sums.h"

namespace brigade {

std::optional<int64_t> count_collectives(c10d::ProcessGroup& group) {
  int64_t count = 0;
  std::set<const c10d::Backend*> counted;
  try {
    for (const c10::Device& device : group.getDeviceTypes()) {
      const auto backend = group.getBackend(device.type());
      if (!counted.insert(backend.get()).second) continue;
      count += static_cast<int64_t>(backend->getSequenceNumberForGroup());
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  if (counted.empty()) return std::nullopt;
  return count + HostSums::num_launches(group);
}

}  // namespace brigade
