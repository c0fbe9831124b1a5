// Cluster of hosts with GPUs for the simulator, and the time and traffic of a
// collective on it.
//
//   Cluster cluster = {.device = *named_device("h100"), .hosts = 2};
//   cluster.inside = *named_link("nvlink4");
//   cluster.between = *named_link("ndr");
//   run_collective(Collective::kAllGather, 1e9, *shard_group(cluster, 16),
//                 cluster);
//
// Sizes are bytes of the whole tensor, times are seconds.
//
// Thread safety: functions are pure.

#ifndef BRIGADE_SIMULATION_CLUSTER_H_
#define BRIGADE_SIMULATION_CLUSTER_H_

#include <cstdint>
#include <map>
#include <string_view>

#include "absl/status/statusor.h"
#include "brigade/planning/collective_cost.h"
#include "brigade/planning/collective_formulas.h"

namespace brigade {

struct Device {
  double flops_per_s = 0;         // peak, dense, in 16 bits; 0: unknown
  double memory_bytes = 0;        // 0: no limit
  double memory_bytes_per_s = 0;  // 0: copies and optimizers take no time
  double utilization = 0.5;       // share of the peak that compute reaches
};

// "a100" (80 GB), "h100" or "b200". Errors: InvalidArgument for another name.
absl::StatusOr<Device> named_device(std::string_view name);

enum class Collective : uint8_t { kAllReduce, kAllGather, kReduceScatter };

struct Cluster {
  Device device = {};
  int hosts = 1;
  int gpus_per_host = 8;
  LinkSpeed inside = {0, 450e9};  // of a GPU
  LinkSpeed between = {0, 50e9};  // of a NIC
  int nics_per_host = 0;          // 0: one per GPU
  int hosts_per_rack = 0;         // 0: all hosts
  // Bandwidth of a rack's NICs / bandwidth of its uplink.
  double oversubscription = 1;
  // All-reduces may take NCCL's LL and LL128, at NCCL's own latencies.
  bool has_nccl_protocols = false;
  double jitter = 0;  // standard deviation of a rank's compute / its mean
  double straggler_slowdown = 1;  // compute of the slowest rank / of the others
  // Replace links, if any. Of the strategy's group: of all ranks for DDP, of a
  // shard group for all-gathers and reduce-scatters, of a replica group for the
  // all-reduces of hybrid sharding.
  std::map<Collective, CollectiveCost> measured = {};

  int ranks() const { return hosts * gpus_per_host; }
};

// Compute time of the slowest rank / of a rank without jitter: the expected
// maximum over ranks, which all others wait for.
double compute_slowdown(const Cluster& cluster);

// Ranks of a collective: `ranks_per_host` on each of `hosts` hosts.
struct RankGroup {
  int hosts = 1;
  int ranks_per_host = 1;
  int groups_per_host = 1;  // that share a host's NICs
  int racks = 1;
  int groups_per_rack = 1;  // of different hosts, that share its uplink

  int ranks() const { return hosts * ranks_per_host; }
};

// Consecutive ranks that hold one copy of the model.
// Errors: InvalidArgument unless `shard_ranks` divides the GPUs of a host, or
// is a multiple of them that divides all ranks.
absl::StatusOr<RankGroup> shard_group(const Cluster& cluster, int shard_ranks);
// The ranks that hold the same shard. REQUIRES: shard_group() succeeds.
RankGroup replica_group(const Cluster& cluster, int shard_ranks);

// Sent per rank, on average over ranks.
struct Traffic {
  double sent_bytes = 0;
  double between_hosts_bytes = 0;
  double between_racks_bytes = 0;

  Traffic& operator+=(const Traffic& other);
};

struct CollectiveRun {
  double seconds = 0;
  Traffic traffic = {};

  CollectiveRun& operator+=(const CollectiveRun& other);  // one after the other
};

// Returns the fastest of: one ring through all ranks; rings in each host and
// between hosts; rings in each host and logarithmic exchanges between hosts
// (NCCL's PAT; recursive halving and doubling); NCCL's choice for an
// all-reduce. Rings cross a rack's uplink once, logarithmic exchanges with all
// hosts.
CollectiveRun run_collective(Collective collective, double bytes,
                             const RankGroup& group, const Cluster& cluster);

}  // namespace brigade

#endif  // BRIGADE_SIMULATION_CLUSTER_H_
