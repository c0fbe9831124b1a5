#include "brigade/comm/ranks_of_host.h"

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/errors/ranks_by_value.h"
#include "brigade/comm/errors/shortened_list.h"
#include "brigade/comm/errors/status_bridge.h"
#include "brigade/comm/group/numbers_of_ranks.h"
#include "brigade/comm/group/shared_segment.h"

namespace brigade {
namespace {

absl::Status refuse(const std::string& found) {
  return absl::InvalidArgumentError(absl::StrCat(
      "ranks_of_a_host: expected hosts with equally many ranks, next to each "
      "other, found ",
      found,
      ".\nStart as many ranks on each host, numbered host by host, or give a "
      "number of shards."));
}

std::string describe(const std::vector<RanksOfValue<int64_t>>& hosts) {
  return shortened_list(hosts.size(), [&](size_t host) {
    return absl::StrCat(describe_ranks(hosts[host].ranks), " on ",
                        host == 0 ? "one host" : "another");
  });
}

}  // namespace

absl::StatusOr<int> ranks_of_a_host(const std::vector<int64_t>& host_by_rank) {
  const auto unknown = std::ranges::find(host_by_rank, 0);
  if (unknown != host_by_rank.end()) {
    return refuse(absl::StrCat("that rank ", unknown - host_by_rank.begin(),
                               " does not know its host"));
  }
  const std::vector<RanksOfValue<int64_t>> hosts = ranks_by_value(host_by_rank);
  const size_t number = hosts.front().ranks.size();
  for (const RanksOfValue<int64_t>& host : hosts) {
    const auto& ranks = host.ranks;
    const bool are_neighbours =
        ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size());
    if (ranks.size() != number || !are_neighbours) {
      return refuse(describe(hosts));
    }
  }
  return static_cast<int>(number);
}

int ranks_of_a_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (group->getSize() == 1) return 1;
  return value_or_throw(ranks_of_a_host(numbers_of_ranks(
      group, SharedSegment::host(),
      "could not tell the others its host, for ranks_of_a_host()")));
}

}  // namespace brigade
