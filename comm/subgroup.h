// Groups of some ranks of another group, with connections of their own.

#ifndef BRIGADE_COMM_SUBGROUP_H_
#define BRIGADE_COMM_SUBGROUP_H_

#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"

namespace brigade {

// Collective over `group`: each rank makes the group of the ranks it names, in
// that order and itself among them, and each of these names the same in the
// same order. Errors of what is done on it name ranks of `group`, if the order
// is a rising one. Ends with the scope; for a device, apart (GroupEnd::kApart).
//
// `device`: the CPU, over Gloo; a CUDA device, over NCCL, or over Gloo where
// that is what serves it in `group`; another one, over what the group's
// ProcessGroupOptions::make_backend makes, or if a group of the same process
// answers for all of its ranks (comm/group/subgroup_answers.h). It serves that
// device only, unless over Gloo. Its timeout is the group's. Errors: ValueError
// if `ranks` are not as said, or the group has no store; as
// make_process_group().
GroupScope make_subgroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const std::vector<int>& ranks,
                         c10::Device device = at::kCPU);

}  // namespace brigade

#endif  // BRIGADE_COMM_SUBGROUP_H_
