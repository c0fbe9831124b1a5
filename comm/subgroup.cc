#include "brigade/comm/subgroup.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/backends/device_backend.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

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
  const uint64_t number = ChannelIdentity::made_together(group).number();
  const std::string name =
      absl::StrCat("brigade/subgroup/", number, "/", absl::StrJoin(ranks, "_"));
  const bool over_gloo =
      !device.is_cpu() && is_over_gloo(*group, device.type());
  const c10::DeviceGuard on_device(device);  // which the backend is bound to
  auto made = make_process_group(
      c10::make_intrusive<c10d::PrefixStore>(name, store), own, size,
      {.device_type = over_gloo ? at::kCPU : device.type(),
       .make_backend =
           over_gloo ? nullptr : find_make_backend(*group, device.type()),
       .serves_cpu = over_gloo || device.is_cpu(),
       .timeout = group_timeout(*group),
       .name = name});
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

}  // namespace brigade
