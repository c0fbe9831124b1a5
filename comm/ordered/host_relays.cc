#include "brigade/comm/ordered/host_relays.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace brigade {

HostRelays::HostRelays(int rank, const std::vector<int>& hosts)
    : origins_(hosts.size()) {
  const int size = static_cast<int>(hosts.size());
  std::map<int, std::vector<int>> ranks_of;  // by host
  for (int other = 0; other < size; ++other) {
    ranks_of[hosts[other]].push_back(other);
  }
  for (int origin = 0; origin < size; ++origin) {
    const std::vector<int>& beside = ranks_of[hosts[origin]];
    const auto place =
        static_cast<size_t>(std::ranges::find(beside, origin) - beside.begin());
    for (const auto& [host, ranks] : ranks_of) {
      if (host == hosts[origin]) continue;
      const int receiver = ranks[place % ranks.size()];
      origins_[receiver].push_back(origin);
      if (origin == rank) receivers_.push_back(receiver);
    }
  }
  std::ranges::sort(receivers_, {}, [&](int receiver) {
    return (receiver - rank + size) % size;
  });
}

}  // namespace brigade
