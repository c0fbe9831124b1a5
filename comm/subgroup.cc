#include "brigade/comm/subgroup.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/backends/device_backend.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/group/group_info.h"
#include "brigade/comm/group/shared_segment.h"

namespace brigade {
namespace {

struct SubgroupCounts {
  std::mutex mutex;
  std::map<std::vector<int>, int> made;  // by their ranks; guarded by mutex
};

// The same on all of its ranks; another one at each call.
std::string subgroup_name(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                          const std::vector<int>& ranks) {
  const auto counts = per_group<SubgroupCounts>(group);
  const std::lock_guard<std::mutex> lock(counts->mutex);
  return absl::StrCat("brigade/subgroup/", absl::StrJoin(ranks, "_"), "/",
                      ++counts->made[ranks]);
}

c10::intrusive_ptr<c10d::ProcessGroup> connect_subgroup(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::vector<int>& ranks, c10::Device device) {
  const int own = static_cast<int>(std::ranges::find(ranks, group->getRank()) -
                                   ranks.begin());
  const int size = static_cast<int>(ranks.size());
  if (auto* answers = find_answers(*group, device.type())) {
    return answers->make_subgroup(own, size);
  }
  const auto store = control_store(*group);
  TORCH_CHECK_VALUE(store, "subgroup: the group of ", group->getSize(),
                    " ranks has no store to connect them by.\nUse a group made "
                    "by init_process_group().");
  const std::string name = subgroup_name(group, ranks);
  if (!has_peers(*group)) {  // collectives that go nowhere
    auto made = c10::make_intrusive<c10d::ProcessGroup>(store, own, size);
    made->setBackend(device.type(), c10d::ProcessGroup::BackendType::CUSTOM,
                     find_backend(*group, device.type()));
    made->setGroupName(name);
    return made;
  }
  const bool over_gloo =
      !device.is_cpu() && is_over_gloo(*group, device.type());
  const c10::DeviceGuard on_device(device);  // which the backend is bound to
  auto made = connect_process_group(
      c10::make_intrusive<c10d::PrefixStore>(name, store), own, size,
      {.device_type = over_gloo ? at::kCPU : device.type(),
       .make_backend =
           over_gloo ? nullptr : find_make_backend(*group, device.type()),
       .timeout = group_timeout(*group),
       .name = name},
      /*serves_cpu=*/over_gloo || device.is_cpu());
  if (over_gloo) {
    made->setBackend(device.type(), c10d::ProcessGroup::BackendType::GLOO,
                     made->getBackend(at::kCPU));
  }
  return made;
}

}  // namespace

GroupScope make_subgroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const std::vector<int>& ranks, c10::Device device) {
  TORCH_CHECK_VALUE(group,
                    "make_subgroup: the process group is null.\nGive that of "
                    "init_process_group().");
  std::vector<int> sorted = ranks;
  std::ranges::sort(sorted);
  const bool are_distinct = std::ranges::adjacent_find(sorted) == sorted.end();
  TORCH_CHECK_VALUE(
      are_distinct && std::ranges::binary_search(sorted, group->getRank()) &&
          sorted.front() >= 0 && sorted.back() < group->getSize(),
      "subgroup: expected ranks of the group of ", group->getSize(),
      ", each once, rank ", group->getRank(), " among them, found ",
      absl::StrJoin(ranks, ", "), ".\nName each rank that is to be in it.");
  if (ranks.size() == 1) return GroupScope(single_process_group());
  auto made = connect_subgroup(group, ranks, device);
  if (std::ranges::is_sorted(ranks)) {  // else they are numbered anew
    RankNames::of(*group).of_some(ranks).set_for(made);
  }
  return GroupScope(std::move(made),
                    device.is_cpu() ? GroupEnd::kHere : GroupEnd::kApart);
}

int ranks_of_a_host(const std::vector<int64_t>& host_by_rank) {
  const auto check = [](bool holds, const auto& describe_found) {
    TORCH_CHECK_VALUE(
        holds,
        "ranks_of_a_host: expected hosts with equally many ranks, "
        "next to each other, found ",
        describe_found(),
        ".\nStart as many ranks on each host, numbered host by "
        "host, or give a number of shards.");
  };
  const auto unknown = std::ranges::find(host_by_rank, 0);
  check(unknown == host_by_rank.end(), [&] {
    return absl::StrCat("that rank ", unknown - host_by_rank.begin(),
                        " does not know its host");
  });
  const std::vector<RanksOfValue<int64_t>> hosts = ranks_by_value(host_by_rank);
  const size_t number = hosts.front().ranks.size();
  const bool are_alike = std::ranges::all_of(hosts, [&](const auto& host) {
    const int span = host.ranks.back() - host.ranks.front() + 1;
    return host.ranks.size() == number && span == static_cast<int>(number);
  });
  check(are_alike, [&] {
    return shortened_list(hosts.size(), [&](size_t host) {
      return absl::StrCat(describe_ranks(hosts[host].ranks), " on ",
                          host == 0 ? "one host" : "another");
    });
  });
  return static_cast<int>(number);
}

int ranks_of_a_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  if (group->getSize() == 1) return 1;
  return ranks_of_a_host(numbers_of_ranks(
      group, {SharedSegment::host()},
      "could not tell the others its host, for ranks_of_a_host()"));
}

}  // namespace brigade
