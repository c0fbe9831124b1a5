// Groups of some ranks of another group, with connections of their own; of all
// its ranks as a matrix; and the number of ranks on each host.

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

// A group whose ranks are in the order of a matrix's rows: the ranks of a row
// share one copy of the parameters, and the rows are replicas.
//
//   // Ranks 0 and 1 are on one host, 2 and 3 on another: shards between hosts,
//   // replicas inside of them.
//   const RankMesh mesh(scope.group(), {{0, 2}, {1, 3}});
//   const auto model = fully_shard(*net, mesh);
//
// Training starts with the parameters of the mesh's first rank, and errors
// number the ranks in the mesh's order.
//
// Thread safety: immutable.
class RankMesh {
 public:
  // Collective over `group`, with the same rows on all its ranks: each rank
  // once, and rows of one length. One row is a mesh of one dimension. `device`:
  // of the model, as for make_subgroup(). If the order is not that of `group`,
  // makes a subgroup, which ends with this object.
  //
  // Errors: ValueError on all ranks if rows are not as said; as
  // make_subgroup().
  RankMesh(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
           const std::vector<std::vector<int>>& rows,
           c10::Device device = at::kCPU);

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  int row_length() const { return row_length_; }

 private:
  std::unique_ptr<GroupScope> made_;  // null: none was
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int row_length_ = 0;
};

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
