// All-gathers and reduce-scatters of flat tensors on a mesh, over a group or in
// the order of ranks.

#ifndef BRIGADE_FSDP_SHARD_TRANSPORT_H_
#define BRIGADE_FSDP_SHARD_TRANSPORT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/fsdp/streams.h"

namespace brigade {

// Which ranks share a row of a mesh, and which a column: those of a row hold
// the parts of parameters, those of a column the same part.

// Of the row that `rank` is in, `num_shards` ranks in rising order. Of a number
// that divides that one: its neighbours in the row.
inline std::vector<int> row_of(int rank, int num_shards) {
  std::vector<int> ranks(num_shards);
  std::iota(ranks.begin(), ranks.end(), rank / num_shards * num_shards);
  return ranks;
}

// Of its column.
inline std::vector<int> column_of(int rank, int num_shards, int num_ranks) {
  std::vector<int> ranks;
  for (int r = rank % num_shards; r < num_ranks; r += num_shards) {
    ranks.push_back(r);
  }
  return ranks;
}

// Groups of ranks next to each other in a row of a mesh, by how many they are.
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

// How shards are gathered and gradients are summed: the collectives of a mesh.
//
// A mesh has R rows of F ranks. A unit's parameters are cut into F shards over
// a row; the ranks of a column hold the same shard. All ranks of a row gather
// together; a gradient is summed over a row first, and then over the column.
// R = 1: full sharding. F = 1: every rank holds all.
//
// Gathers and sums are independent of each other, each in the order of its
// calls, which is the same on all ranks. On devices with streams they are
// launched with one of streams() current, behind what that one has been given;
// their futures are complete then, and make streams wait; but those of Gloo,
// which keeps the host waiting.
//
// Thread safety: one call at a time of each kind.
class ShardTransport {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  virtual ~ShardTransport() = default;

  // `whole`: [F * S], whose slice of this rank's place in its row is there.
  // Writes the others.
  virtual FuturePtr all_gather(const at::Tensor& whole) = 0;

  // The same among `num_ranks` neighbours of a row, one of the numbers that it
  // was made for: of [F * S] in so many slices, that of this rank's place among
  // them is there.
  virtual FuturePtr all_gather_near(const at::Tensor& whole, int num_ranks) = 0;

  struct Sum {
    double scale = 1;           // unless scales() is false
    bool over_replicas = true;  // false: over the ranks of this row only
    // [S], of any floating dtype: what this row has summed before, which is
    // added to its sum before that goes over replicas. Undefined: nothing.
    at::Tensor of_row = {};
  };

  // Writes into `shard` [S] this rank's slice of the sum over all ranks of
  // `whole` [F * S], times the scale.
  virtual FuturePtr reduce_scatter(const at::Tensor& whole,
                                   const at::Tensor& shard, Sum sum) = 0;

  // Replaces `tensor` by its sum over all ranks, in their order.
  virtual FuturePtr all_reduce(const at::Tensor& tensor) = 0;

  // Bytes that this rank has sent in gathers and in reduce_scatter()s, as many
  // as a ring sends.
  struct Sent {
    int64_t by_gathers = 0;
    int64_t by_sums = 0;
  };
  virtual Sent sent() const = 0;

  // False: the sum is to be scaled by whoever takes it.
  virtual bool scales() const = 0;

  // Groups that serve these collectives alone, and end with it: to be closed
  // where a peer is lost.
  virtual std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> own_groups()
      const {
    return {};
  }

  const ShardingStreams& streams() const { return streams_; }
  int num_shards() const { return num_shards_; }      // F
  int num_replicas() const { return num_replicas_; }  // R
  int shard_rank() const { return shard_rank_; }      // this rank's place

 protected:
  ShardTransport(int num_shards, int num_replicas, int shard_rank,
                 const ShardingStreams& streams = ShardingStreams(at::kCPU))
      : num_shards_(num_shards),
        num_replicas_(num_replicas),
        shard_rank_(shard_rank),
        streams_(streams) {}

  // Of a reduce-scatter or all-gather of these elements over so many ranks.
  static int64_t bytes_by_ring(const at::Tensor& whole, int num_ranks) {
    return static_cast<int64_t>(whole.nbytes()) / num_ranks * (num_ranks - 1);
  }

 private:
  const int num_shards_;
  const int num_replicas_;
  const int shard_rank_;
  const ShardingStreams streams_;
};

// Sums in the order of the ranks (comm/ordered/ordered_collectives.h), on
// connections of its own: on CPUs. Collective over the group. `num_shards`
// divides the number of ranks: rank r is in row r / F. `neighbours`: numbers of
// ranks that gather among themselves, which divide F.
//
// Errors: ValueError if it does not; as OrderedCollectives'.
std::unique_ptr<ShardTransport> make_ordered_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const std::vector<int>& neighbours = {});

// By the group's own collectives, full sharding only: for a recording group on
// the CPU.
std::unique_ptr<ShardTransport> make_group_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const std::vector<int>& neighbours = {});

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_TRANSPORT_H_
