// Ranks as a matrix: those of a row share what rows are replicas of.
//
//   // Ranks 0 and 1 are on one host, 2 and 3 on another: shards between hosts,
//   // replicas inside of them.
//   const RankMesh mesh(scope.group(), {{0, 2}, {1, 3}});
//   const auto model = fully_shard(*net, mesh);
//
// What goes by rows, sharding and sums that are reproducible, takes a group and
// how many ranks next to each other are a row. So a mesh is a group whose ranks
// are in the order of the rows, one behind the other. What is trained on it
// begins with the parameters of the first of them, and errors number them so.
//
// Thread safety: immutable.

#ifndef BRIGADE_COMM_RANK_MESH_H_
#define BRIGADE_COMM_RANK_MESH_H_

#include <c10/core/Device.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"

namespace brigade {

class RankMesh {
 public:
  // Collective over `group`, with the same rows on all its ranks: each rank
  // once, and rows of one length. One row is a mesh of one dimension.
  // `device`: of what is to be trained, as make_subgroup()'s; the group that it
  // makes, where the order is another than that of `group`, ends with this
  // object.
  //
  // Errors: ValueError on all ranks alike if rows are not as said; as
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

}  // namespace brigade

#endif  // BRIGADE_COMM_RANK_MESH_H_
