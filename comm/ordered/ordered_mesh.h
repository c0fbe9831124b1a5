// Reduce-scatters over a mesh of ranks: an element is summed over a row first,
// then the rows' sums over the column, both in order.
//
//   4 ranks as 2 rows of 2:  rank 0  rank 1     rows {0, 1} {2, 3}
//                            rank 2  rank 3     columns {0, 2} {1, 3}
//   OrderedMesh mesh(row_group, column_group);
//   mesh.reduce_scatter(gradients, shard, 1.0 / world_size)->wait();
//
// Each rank gets its row's slice of the sum over all ranks; the ranks of a
// column get the same one.  The bits are those of OrderedCollectives over all
// ranks, row by row, with the row's length as group size.  Over the column
// travels the slice only.
//
// *Order of launches.*  The second sums are launched in the order of the calls,
// as the first ones are done, on a thread that waits for these: nobody waits
// who calls, and ranks need not agree about which first sum is done first.
//
// *Failure.*  What ends one direction ends the other: a lost rank is one
// PeerError in all reductions in flight on all ranks of the mesh, and in later
// ones.  The groups' other use goes on.
//
// Thread safety: any thread may call; the calls come in the same order on all
// ranks of the mesh.

#ifndef BRIGADE_COMM_ORDERED_ORDERED_MESH_H_
#define BRIGADE_COMM_ORDERED_ORDERED_MESH_H_

#include <ATen/core/Tensor.h>
#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/comm/ordered/rank_slice.h"

namespace brigade {

class OrderedMesh {
 public:
  using FuturePtr = OrderedCollectives::FuturePtr;

  // Collective over the mesh.  `row`, `column`: this rank's, their ranks in the
  // order of the mesh.  Errors: as OrderedCollectives'.
  OrderedMesh(const c10::intrusive_ptr<c10d::ProcessGroup>& row,
              const c10::intrusive_ptr<c10d::ProcessGroup>& column,
              int64_t part_bytes = OrderedOptions{}.part_bytes);

  // As OrderedCollectives'.
  ~OrderedMesh();

  OrderedMesh(const OrderedMesh&) = delete;
  OrderedMesh& operator=(const OrderedMesh&) = delete;

  // Writes into `output` the sum over all ranks of elements
  // slice(input.numel()) of `input` [any shape], times `scale`.  `output` may
  // be just that part of `input`.  `of_row`, as `output`: what the row has
  // summed before, which is added to its sum; not to be written to until all is
  // over; undefined: nothing. The future holds a list of the output, or ends
  // with PeerError.
  //
  // Errors: as OrderedCollectives::reduce_scatter(). REQUIRES: there are
  // several rows if `of_row` is defined.
  FuturePtr reduce_scatter(const at::Tensor& input, const at::Tensor& output,
                           std::optional<double> scale = std::nullopt,
                           const at::Tensor& of_row = {});

  // The same over this rank's row only.
  FuturePtr reduce_scatter_in_row(const at::Tensor& input,
                                  const at::Tensor& output,
                                  std::optional<double> scale = std::nullopt) {
    return row_->reduce_scatter(input, output, scale);
  }

  // As OrderedCollectives'; of both sums.
  int64_t sent_bytes() const {
    return row_->sent_bytes(OrderedKind::kReduceScatter) +
           column_->sent_bytes(OrderedKind::kAllReduce);
  }

  // Of this rank, of n elements in a row.
  RankSlice slice(int64_t numel) const { return row_->slice(numel); }

 private:
  struct Reduction;

  void row_is_done(Reduction& reduction, c10::ivalue::Future& sum);
  void launch_second_sums();
  void column_is_done(Reduction& reduction, c10::ivalue::Future& sum);

  // Constant after construction.
  const bool has_one_row_;  // whose sum is rounded and scaled at once
  const pid_t process_;

  std::mutex mutex_;
  // Guarded by mutex_.
  std::deque<std::shared_ptr<Reduction>> in_row_;  // in the order of the calls
  bool is_ending_ = false;

  // The row's callbacks use the column's, and end before it.
  std::unique_ptr<OrderedCollectives> column_;
  std::unique_ptr<OrderedCollectives> row_;
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_ORDERED_MESH_H_
