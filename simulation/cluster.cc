#include "brigade/simulation/cluster.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

// Expected maximum of n standard normals: the quantile of Blom 1958.
double expected_maximum(double n) {
  if (n <= 1) return 0;
  const double above = 1 - (n - 0.375) / (n + 0.25);
  double low = 0;
  double high = 10;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(middle / std::sqrt(2.0)) / 2 > above ? low : high) = middle;
  }
  return low;
}

// The most racks that one of the groups of `hosts` consecutive hosts is in.
int racks_of(const Cluster& cluster, int hosts) {
  const int size = cluster.hosts_per_rack;
  int racks = 1;
  for (int first = 0; size > 0 && first < cluster.hosts; first += hosts) {
    racks = std::max(racks, (first + hosts - 1) / size - first / size + 1);
  }
  return racks;
}

// The bandwidth of a host's NICs that a group gets.
LinkSpeed link_between(const RankGroup& group, const Cluster& cluster) {
  const double nics = cluster.nics_per_host == 0 ? cluster.gpus_per_host
                                                 : cluster.nics_per_host;
  return {cluster.between.latency_s,
          cluster.between.bytes_per_s * nics / group.groups_per_host};
}

// A reduce-scatter or all-gather.
CollectiveRun run_phase(double bytes, const RankGroup& group,
                        const Cluster& cluster) {
  const int ranks = group.ranks();
  const double sent = ring_reduce_scatter_bytes(bytes, ranks);
  const double inside_s =
      ring_reduce_scatter_s(bytes, group.ranks_per_host, cluster.inside);
  if (group.hosts == 1) return {inside_s, {.sent_bytes = sent}};

  const LinkSpeed nics = link_between(group, cluster);
  LinkSpeed between = nics;  // of rings
  const double uplink =
      nics.bytes_per_s / cluster.oversubscription;  // a host's
  if (group.racks > 1) {
    between.bytes_per_s =
        std::min(between.bytes_per_s,
                 uplink * cluster.hosts_per_rack / group.groups_per_rack);
  }

  // One ring: of its links, one per host and one per rack leave.
  const double part = bytes / ranks;
  double step_s = between.latency_s + part / between.bytes_per_s;
  if (group.ranks_per_host > 1) {
    step_s = std::max(
        step_s, cluster.inside.latency_s + part / cluster.inside.bytes_per_s);
  }
  const double per_host = 1.0 / group.ranks_per_host;
  const double per_rack =
      group.racks == 1 ? 0 : static_cast<double>(group.racks) / group.hosts;
  const CollectiveRun one_ring = {
      (ranks - 1) * step_s,
      {sent, sent * per_host, sent * per_host * per_rack}};

  const double leaves = ring_reduce_scatter_bytes(bytes, group.hosts);
  const CollectiveRun two_rings = {
      inside_s + ring_reduce_scatter_s(bytes, group.hosts, between),
      {sent, leaves * per_host, leaves * per_host * per_rack}};

  const double levels = std::bit_width(static_cast<unsigned>(group.hosts - 1));
  const double across = ring_reduce_scatter_bytes(bytes, group.racks);
  const CollectiveRun logarithmic = {
      inside_s + levels * nics.latency_s +
          (leaves - across) / nics.bytes_per_s + across / uplink,
      {sent, leaves * per_host, across * per_host}};
  return std::min({one_ring, two_rings, logarithmic},
                  [](auto& a, auto& b) { return a.seconds < b.seconds; });
}

}  // namespace

absl::StatusOr<Device> named_device(std::string_view name) {
  // Peaks and memory: NVIDIA's data sheets (SXM). Utilization: assumptions from
  // published runs of large transformers, FSDP on A100 (Zhao et al. 2023: 55-60
  // %) and Llama 3 on H100 (38-43 %, with its communication).
  if (name == "a100") return Device{312e12, 80e9, 2.0e12, 0.58};
  if (name == "h100") return Device{989e12, 80e9, 3.35e12, 0.5};
  if (name == "b200") return Device{2250e12, 180e9, 8e12, 0.5};
  return absl::InvalidArgumentError(absl::StrCat(
      "cluster: expected device a100, h100, b200 or an object, found '",
      std::string(name), "'"));
}

double compute_slowdown(const Cluster& cluster) {
  return std::max(cluster.straggler_slowdown,
                  1 + cluster.jitter * expected_maximum(cluster.ranks()));
}

Traffic& Traffic::operator+=(const Traffic& other) {
  sent_bytes += other.sent_bytes;
  between_hosts_bytes += other.between_hosts_bytes;
  between_racks_bytes += other.between_racks_bytes;
  return *this;
}

CollectiveRun& CollectiveRun::operator+=(const CollectiveRun& other) {
  seconds += other.seconds;
  traffic += other.traffic;
  return *this;
}

absl::StatusOr<RankGroup> shard_group(const Cluster& cluster, int shard_ranks) {
  const int gpus = cluster.gpus_per_host;
  if (shard_ranks >= 1 && gpus % shard_ranks == 0) {
    return RankGroup{.ranks_per_host = shard_ranks,
                     .groups_per_host = gpus / shard_ranks};
  }
  if (shard_ranks >= 1 && shard_ranks % gpus == 0 &&
      cluster.ranks() % shard_ranks == 0) {
    const int hosts = shard_ranks / gpus;
    return RankGroup{.hosts = hosts,
                     .ranks_per_host = gpus,
                     .racks = racks_of(cluster, hosts)};
  }
  return absl::InvalidArgumentError(
      absl::StrCat("cluster: expected shard_ranks that divide ", gpus,
                   " GPUs per host, or multiples of them that divide ",
                   cluster.ranks(), " ranks, found ", shard_ranks));
}

RankGroup replica_group(const Cluster& cluster, int shard_ranks) {
  const int gpus = cluster.gpus_per_host;
  const int ranks_per_host = std::max(gpus / shard_ranks, 1);
  const int hosts = cluster.ranks() / shard_ranks / ranks_per_host;
  return {.hosts = hosts,
          .ranks_per_host = ranks_per_host,
          .groups_per_host = gpus / ranks_per_host,
          .racks = std::min(hosts, racks_of(cluster, cluster.hosts)),
          .groups_per_rack = std::clamp(cluster.hosts_per_rack, 1,
                                        std::max(shard_ranks / gpus, 1))};
}

CollectiveRun run_collective(Collective collective, double bytes,
                             const RankGroup& group, const Cluster& cluster) {
  if (group.ranks() == 1) return {};
  CollectiveRun run = run_phase(bytes, group, cluster);
  if (collective == Collective::kAllReduce) {
    run += CollectiveRun(run);
    if (cluster.has_nccl_protocols) {
      HostGrid grid = {group.hosts, group.ranks_per_host, cluster.inside,
                       link_between(group, cluster)};
      if (group.racks > 1) grid.between.bytes_per_s /= cluster.oversubscription;
      run.seconds = std::min(run.seconds, nccl_all_reduce(bytes, grid).seconds);
    }
  }
  const auto cost = cluster.measured.find(collective);
  if (cost != cluster.measured.end()) {
    run.seconds = cost->second.seconds(static_cast<int64_t>(bytes));
  }
  return run;
}

}  // namespace brigade
