#include "brigade/fsdp/transport/neighbour_groups.h"

#include "brigade/comm/group/group_collectives.h"
#include "brigade/comm/subgroup.h"
#include "brigade/fsdp/transport/mesh_ranks.h"

namespace brigade {

NeighbourGroups::NeighbourGroups(const Group& group,
                                 const std::vector<int>& numbers,
                                 c10::Device device) {
  for (const int number : numbers) {
    made_.try_emplace(number, group, number, device);
  }
}

NeighbourGroups::Made::Made(const Group& group, int number, c10::Device device)
    : scope(make_subgroup(group, row_of(group->getRank(), number), device)) {}

std::vector<NeighbourGroups::Group> NeighbourGroups::all() const {
  std::vector<Group> all;
  for (const auto& [number, made] : made_) all.push_back(made.scope.group());
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> NeighbourGroups::all_gather(
    const at::Tensor& whole, int number) const {
  const Group& group = of(number);
  const int64_t numel = whole.numel() / number;
  return gather_into(*group, whole,
                     whole.narrow(0, group->getRank() * numel, numel))
      ->getFuture();
}

}  // namespace brigade
