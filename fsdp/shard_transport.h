// All-gathers and reduce-scatters of flat tensors over one mesh of ranks, and
// the meshes of a model's units.
//
// A mesh has R shard groups of F consecutive ranks. The R ranks with the same
// shard form a replica group. All-gathers run in a shard group. Gradients are
// reduced over the shard group, then over the replica group. R = 1: full
// sharding. F = 1: data parallelism.

#ifndef BRIGADE_FSDP_SHARD_TRANSPORT_H_
#define BRIGADE_FSDP_SHARD_TRANSPORT_H_

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/comm/streams/streams.h"
#include "brigade/fsdp/sharded_model.h"
#include "brigade/fsdp/sharded_tensor.h"

namespace brigade {

// Side streams of a model, one for all-gathers and one for reductions, so that
// collectives do not wait for computation or for each other. None on the CPU.
//
// Thread safety: any thread; a guard belongs to its thread.
class ShardingStreams {
 public:
  explicit ShardingStreams(c10::Device device)
      : device_(device),
        gathers_(side_stream_if_any(device)),
        reductions_(side_stream_if_any(device)) {}

  c10::Device device() const { return device_; }

  // Make the stream current while the guard lives.
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
// kind in call order, which must be the same on all ranks. On devices a launch
// runs on the current stream, one of streams(). Its future is complete at once,
// and wait() makes the current stream wait; over Gloo the host waits.
//
// Thread safety: one call at a time of each kind.
class ShardTransport {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  virtual ~ShardTransport() = default;

  // All-gathers `whole` in place over `num_ranks` consecutive ranks, each with
  // an equal slice. `num_ranks`: num_shards() or one of the gather sizes.
  FuturePtr all_gather(const at::Tensor& whole, int num_ranks);

  struct ReduceOptions {
    double scale = 1;           // ignored unless scales()
    bool over_replicas = true;  // false: reduce over the shard group only
    // [S], any floating dtype: an earlier reduction over the shard group only,
    // added before the reduction over the replica group. Undefined: none.
    at::Tensor partial_sum = {};
  };

  // Reduces `whole` [F * S] over the mesh and writes this rank's slice, times
  // the scale, into `shard` [S].
  FuturePtr reduce_scatter(const at::Tensor& whole, const at::Tensor& shard,
                           const ReduceOptions& options);

  // Bytes sent since construction, as ring algorithms send them.
  struct Sent {
    int64_t by_gathers = 0;
    int64_t by_sums = 0;
  };
  const Sent& sent() const { return sent_; }

  // reduce_scatter() applies `scale`; if not, the caller must.
  virtual bool scales() const = 0;

  // Closes the groups that only this transport uses, after a peer is lost.
  virtual void close_groups() noexcept {}

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
// (comm/ordered/ordered_collectives.h). Collective. `gather_sizes`: numbers of
// ranks for all_gather(), divisors of F. REQUIRES: `num_shards` divides the
// world size. Errors: as OrderedCollectives.
std::unique_ptr<ShardTransport> make_ordered_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const std::set<int>& gather_sizes = {});

// Returns a transport that uses the backend's collectives, on one subgroup for
// each kind, so that each kind has its own stream in the backend. Collective.
// Also serves recording groups on the CPU.
//
// The backend chooses the order of reductions; they are not scaled. `in_order`:
// rank order and scaled, with the CPU's bits, by an exchange of slices that
// takes the memory of `whole` once more. Over Gloo, as when ranks share a
// device, a shard group's reduction is an all-reduce. Errors: as
// make_subgroup().
std::unique_ptr<ShardTransport> make_device_transport(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, int num_shards,
    const ShardingStreams& streams, const std::set<int>& gather_sizes = {},
    bool in_order = false);

// ---- Meshes.

// Returns "ranks 0, 2" or "ranks 0, 1, 2, 3 in shard groups of 2".
std::string describe(const UnitMesh& mesh);

// The mesh of one unit.
struct MeshRequest {
  std::string unit = {};
  std::optional<UnitMesh> mesh = std::nullopt;    // unset: the model's
  uint64_t hash = 0;                              // equal on ranks of one mesh
  std::optional<int> gather_size = std::nullopt;  // UnitSettings::reshard_to
  size_t number = 0;  // of the mesh, set by number_meshes()
};

// Numbers the units' meshes identically on all ranks: 0 is the model's; equal
// meshes share a number. Collective if some unit has its own mesh.
//
// Errors: the same ValueError on all ranks if a mesh is not a set of the
// model's ranks that includes this rank, if ranks of one mesh name different
// ranks or have different hashes, or if meshes of one unit differ in size.
void number_meshes(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   std::span<MeshRequest> units);

// Transports of a model's units: one on the model's process group, and one for
// each distinct UnitMesh.
//
// All ranks launch the collectives of all meshes in one order. Each rank is in
// one group of every mesh, so that order cannot deadlock. On devices all meshes
// share two streams.
//
// Thread safety: as ShardTransport.
class ShardMeshes {
 public:
  struct Mesh {
    std::unique_ptr<GroupScope> scope = nullptr;  // null: the model's group
    std::shared_ptr<ShardTransport> transport = nullptr;
    std::set<int> gather_sizes = {};  // for ShardTransport::all_gather()
    // Of sharded tensors; those that outlive the transport throw RuntimeError
    // when gathered.
    std::shared_ptr<ShardGroup> shard_group = nullptr;
  };

  // Collective. `num_shards`: of the model's mesh. `in_order`: see
  // make_device_transport(). REQUIRES: number_meshes().
  ShardMeshes(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
              int num_shards, c10::Device device,
              std::span<const MeshRequest> units, bool in_order);

  const Mesh& of(size_t mesh_number) const { return meshes_[mesh_number]; }
  const ShardingStreams& streams() const {
    return meshes_.front().transport->streams();
  }
  ShardTransport::Sent sent() const;
  void close_groups() noexcept {
    for (const Mesh& mesh : meshes_) mesh.transport->close_groups();
  }

 private:
  std::vector<Mesh> meshes_;  // by number; the model's first
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SHARD_TRANSPORT_H_
