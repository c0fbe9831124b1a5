// Groups of some ranks of another group, with connections of their own, and the
// number of ranks on each host.

#ifndef BRIGADE_COMM_SUBGROUP_H_
#define BRIGADE_COMM_SUBGROUP_H_

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"

namespace brigade {

// Collective over `group`: each rank makes the group of `ranks`, numbered in
// that order and itself among them; each of these names the same ranks in the
// same order. If the order is rising, errors name ranks of `group`. The
// subgroup ends with the scope; for a device, on a thread of its own
// (GroupEnd::kApart).
//
// `device`: the CPU, over Gloo; a CUDA device, over NCCL, or over Gloo where
// that is what serves it in `group`; another one, over the backend of the
// group's ProcessGroupOptions::make_backend. It serves that device only, unless
// over Gloo. Its timeout is the group's.
//
// Errors: ValueError if `ranks` are not as said, or the group has no store; as
// make_process_group().
GroupScope make_subgroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                         const std::vector<int>& ranks,
                         c10::Device device = at::kCPU);

// Collective. Returns the number of ranks on each host, for shards that stay
// within a host. Ranks that can't share memory (two containers, two network
// namespaces) count as two hosts.
//
// Errors: on all ranks ValueError if hosts have different numbers of ranks,
// ranks of a host are not next to each other, or a rank does not know its host;
// PeerError if ranks don't meet.
int ranks_of_a_host(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// The same from the host of each rank, at least one; 0: not known.
int ranks_of_a_host(const std::vector<int64_t>& host_by_rank);

}  // namespace brigade

#endif  // BRIGADE_COMM_SUBGROUP_H_
