// All-gathers and reduce-scatters of flat tensors on a mesh of ranks.
//
// A mesh has R rows of F ranks. A unit's parameters are cut into F shards over
// a row; the ranks of a column hold the same shard. All ranks of a row gather
// together; a gradient is summed over a row first, and then over the column.
// R = 1: full sharding. F = 1: every rank holds all.

#ifndef BRIGADE_FSDP_SHARD_TRANSPORT_H_
#define BRIGADE_FSDP_SHARD_TRANSPORT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/streams/streams.h"

namespace brigade {

// The ranks of the row that `rank` is in, `num_shards` consecutive ones; and of
// its column.
std::vector<int> row_of(int rank, int num_shards);
std::vector<int> column_of(int rank, int num_shards, int num_ranks);

// The streams that a model launches its collectives on: one for gathers and one
// for sums, so that neither waits for the program's computation nor for the
// other.
//
// Thread safety: any thread; guards belong to one.
class ShardingStreams {
 public:
  explicit ShardingStreams(c10::Device device)
      : device_(device),
        gathers_(side_stream_if_any(device)),
        sums_(side_stream_if_any(device)) {}

  c10::Device device() const { return device_; }

  // While the guard lives the stream is the calling thread's current one.
  c10::OptionalStreamGuard for_gathers() const {
    return c10::OptionalStreamGuard(gathers_);
  }
  c10::OptionalStreamGuard for_sums() const {
    return c10::OptionalStreamGuard(sums_);
  }

 private:
  c10::Device device_;
  std::optional<c10::Stream> gathers_;
  std::optional<c10::Stream> sums_;
};

// Gathers and sums are independent of each other, each in the order of its
// calls, which is the same on all ranks. On devices with streams they are
// launched with one of streams() current, after its earlier work; their futures
// are complete then, and make streams wait. Gloo's keep the host waiting.
//
// Thread safety: one call at a time of each kind.
class ShardTransport {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  virtual ~ShardTransport() = default;

  // `whole`: slices of `num_ranks` consecutive ranks, of which this rank's is
  // valid. Writes the others. num_shards(), or one of the numbers of neighbours
  // that it was made for.
  FuturePtr all_gather(const at::Tensor& whole, int num_ranks);

  struct Sum {
    double scale = 1;           // unless scales() is false
    bool over_replicas = true;  // false: over the ranks of this row only
    // [S], of any floating dtype: an earlier sum of this row, which is added to
    // its sum before that goes over replicas. Undefined: none.
    at::Tensor of_row = {};
  };

  // Writes into `shard` [S] this rank's slice of the sum over all ranks of
  // `whole` [F * S], times the scale.
  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           const Sum& sum);

  // Bytes that this rank has sent in gathers and in reduce_scatter()s, counted
  // as those of rings.
  struct Sent {
    int64_t by_gathers = 0;
    int64_t by_sums = 0;
  };
  const Sent& sent() const { return sent_; }

  // False: the caller scales the sum.
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
  int shard_rank() const { return shard_rank_; }      // place in the row

 protected:
  ShardTransport(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 int num_shards, const ShardingStreams& streams);

  virtual FuturePtr gather(const at::Tensor& whole, int num_ranks) = 0;
  virtual FuturePtr sum(const at::Tensor& whole, const at::Tensor& shard,
                        const Sum& sum) = 0;

 private:
  const int num_shards_;
  const int num_replicas_;
  const int shard_rank_;
  const ShardingStreams streams_;
  Sent sent_;
};

// Sums in the order of the ranks (comm/ordered/ordered_collectives.h), on CPUs.
// Collective over the group. Rank r is in row r / F. `neighbours`: numbers of
// ranks that gather among themselves, which divide F. REQUIRES: `num_shards`
// divides the number of ranks. Errors: as OrderedCollectives'.
std::unique_ptr<ShardTransport> make_ordered_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const std::vector<int>& neighbours = {});

// By the collectives of a device's backend, on subgroups of its own for each
// kind, so that each kind has its own stream there. Sums are the backend's, in
// its order, and not scaled; or, `in_order`, of the ranks' order as on the CPU:
// a row's ranks exchange slices, each adds up what it gets, and so over the
// column, which takes memory of `whole` once more. Over Gloo, as where ranks
// share a device, a row's sum is an all-reduce. `streams`: of a device that the
// group's backend serves. Also for recording groups, on the CPU too. Errors: as
// make_subgroup().
std::unique_ptr<ShardTransport> make_device_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const ShardingStreams& streams, const std::vector<int>& neighbours = {},
    bool in_order = false);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_TRANSPORT_H_
