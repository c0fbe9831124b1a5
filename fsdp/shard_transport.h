// All-gathers and reduce-scatters of flat tensors over one mesh of ranks.
//
// A mesh has R * F ranks in R shard groups. A shard group is F consecutive
// ranks, over which parameters are sharded. The R ranks with equal places in
// their shard groups form a replica group and hold the same shard. All-gathers
// run in a shard group. Gradients are reduced over the shard group, then over
// the replica group. R = 1: full sharding. F = 1: data parallelism.

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

// Return the ranks of `rank`'s shard group and replica group, in rising order.
std::vector<int> shard_group_ranks(int rank, int num_shards);
std::vector<int> replica_group_ranks(int rank, int num_shards, int num_ranks);

// Two side streams of a model, one for all-gathers and one for reductions, so
// that collectives do not wait for computation or for each other. On devices
// without streams, none.
//
// Thread safety: any thread; a guard belongs to the thread that got it.
class ShardingStreams {
 public:
  explicit ShardingStreams(c10::Device device)
      : device_(device),
        gathers_(side_stream_if_any(device)),
        reductions_(side_stream_if_any(device)) {}

  c10::Device device() const { return device_; }

  // Make the stream current on the calling thread while the guard lives.
  c10::OptionalStreamGuard for_gathers() const {
    return c10::OptionalStreamGuard(gathers_);
  }
  c10::OptionalStreamGuard for_reductions() const {
    return c10::OptionalStreamGuard(reductions_);
  }

 private:
  c10::Device device_;
  std::optional<c10::Stream> gathers_;
  std::optional<c10::Stream> reductions_;
};

// Collectives of one mesh. All-gathers and reductions run independently, each
// kind in call order, which must be the same on all ranks. On devices with
// streams the caller makes one of streams() current for a launch. Futures are
// complete at once there and make streams wait, except over Gloo, where the
// host waits.
//
// Thread safety: one call at a time of each kind.
class ShardTransport {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  virtual ~ShardTransport() = default;

  // All-gathers `whole` in place over `num_ranks` consecutive ranks, each with
  // a slice of whole.numel() / num_ranks elements. `num_ranks`: num_shards(),
  // or one of the gather sizes given at construction.
  FuturePtr all_gather(const at::Tensor& whole, int num_ranks);

  struct ReduceOptions {
    double scale = 1;           // ignored unless scales()
    bool over_replicas = true;  // false: reduce over the shard group only
    // [S], any floating dtype: a reduction over the shard group only, added
    // before the reduction over the replica group. Undefined: none.
    at::Tensor partial_sum = {};
  };

  // Reduces `whole` [F * S] over the mesh and writes this rank's slice, times
  // the scale, into `shard` [S].
  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           const ReduceOptions& options);

  // Bytes that this rank sends in collectives since construction, counted as
  // ring algorithms send them.
  struct Sent {
    int64_t by_gathers = 0;
    int64_t by_sums = 0;
  };
  const Sent& sent() const { return sent_; }

  // Whether reduce_scatter() applies `scale`; otherwise the caller scales.
  virtual bool scales() const = 0;

  // Groups that only this transport uses, to be closed when a peer is lost.
  virtual std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> own_groups()
      const {
    return {};
  }

  const ShardingStreams& streams() const { return streams_; }
  int num_shards() const { return num_shards_; }      // F
  int num_replicas() const { return num_replicas_; }  // R
  int shard_rank() const { return shard_rank_; }      // in the shard group

 protected:
  ShardTransport(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                 int num_shards, const ShardingStreams& streams);

  virtual FuturePtr launch_all_gather(const at::Tensor& whole,
                                      int num_ranks) = 0;
  virtual FuturePtr launch_reduce_scatter(const at::Tensor& whole,
                                          const at::Tensor& shard,
                                          const ReduceOptions& options) = 0;

 private:
  const int num_shards_;
  const int num_replicas_;
  const int shard_rank_;
  const ShardingStreams streams_;
  Sent sent_;
};

// Returns the transport for CPU tensors, which reduces in rank order
// (comm/ordered/ordered_collectives.h). Collective over `group`.
// `gather_sizes`: numbers of consecutive ranks for all_gather(); each divides
// F. REQUIRES: `num_shards` divides the world size. Errors: as
// OrderedCollectives.
std::unique_ptr<ShardTransport> make_ordered_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const std::vector<int>& gather_sizes = {});

// Returns a transport that uses the collectives of a device's backend, on one
// subgroup for each kind, so that each kind has its own stream in the backend.
// Collective over `group`. Also serves recording groups on the CPU.
//
// Reductions have the backend's order and are not scaled. `in_order`: they have
// rank order and the CPU's bits. Ranks then exchange slices and each adds up
// its own, which takes the memory of `whole` once more. Over Gloo, as when
// ranks share a device, a shard group's reduction is an all-reduce.
//
// `streams`: of a device that the group's backend serves. Errors: as
// make_subgroup().
std::unique_ptr<ShardTransport> make_device_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const ShardingStreams& streams, const std::vector<int>& gather_sizes = {},
    bool in_order = false);

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_TRANSPORT_H_
