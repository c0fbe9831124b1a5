// Groups of ranks next to each other in a row of a mesh, by how many they are.

#ifndef BRIGADE_FSDP_TRANSPORT_NEIGHBOUR_GROUPS_H_
#define BRIGADE_FSDP_TRANSPORT_NEIGHBOUR_GROUPS_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <map>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"

namespace brigade {

class NeighbourGroups {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // Collective over the group. `numbers`: each divides the ranks of a row.
  // Errors: as make_subgroup().
  NeighbourGroups(const Group& group, const std::vector<int>& numbers,
                  c10::Device device = at::kCPU);

  // REQUIRES: `number` is one of the numbers.
  const Group& of(int number) const { return made_.at(number).scope.group(); }
  std::vector<Group> all() const;

  // By the group's own collective, of equal slices of `whole`.
  c10::intrusive_ptr<c10::ivalue::Future> all_gather(const at::Tensor& whole,
                                                     int number) const;

 private:
  struct Made {
    Made(const Group& group, int number, c10::Device device);
    const GroupScope scope;
  };

  std::map<int, Made> made_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_TRANSPORT_NEIGHBOUR_GROUPS_H_
