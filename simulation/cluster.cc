#include "brigade/simulation/cluster.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

template <typename... Parts>
absl::Status bad_cluster(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("cluster: ", parts...));
}

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

absl::Status check_link(std::string_view place, const LinkSpeed& link) {
  if (std::isfinite(link.bytes_per_s) && link.bytes_per_s > 0 &&
      std::isfinite(link.latency_s) && link.latency_s >= 0) {
    return absl::OkStatus();
  }
  return bad_cluster("expected bytes_per_s > 0 and latency_s >= 0 of '",
                     std::string(place), "', found ", link.bytes_per_s, " and ",
                     link.latency_s);
}

int racks_of(const Cluster& cluster, int hosts) {
  if (cluster.hosts_per_rack == 0) return 1;
  return (hosts + cluster.hosts_per_rack - 1) / cluster.hosts_per_rack;
}

// Adds the faster of two ways to run a phase.
void take_faster(CollectiveRun& best, double seconds, double hosts_bytes,
                 double racks_bytes) {
  if (seconds >= best.seconds) return;
  best.seconds = seconds;
  best.between_hosts_bytes = hosts_bytes;
  best.between_racks_bytes = racks_bytes;
}

// A reduce-scatter or all-gather.
CollectiveRun run_phase(double bytes, const RankGroup& group,
                        const Cluster& cluster) {
  const int ranks = group.ranks();
  const double sent = ring_reduce_scatter_bytes(bytes, ranks);
  const double inside_s =
      ring_reduce_scatter_s(bytes, group.ranks_per_host, cluster.inside);
  if (group.hosts == 1) return {.seconds = inside_s, .sent_bytes = sent};

  const int nics = cluster.nics_per_host == 0 ? cluster.gpus_per_host
                                              : cluster.nics_per_host;
  LinkSpeed between = cluster.between;
  between.bytes_per_s *= static_cast<double>(nics) / group.groups_per_host;
  LinkSpeed crowded = between;
  if (group.racks > 1) {
    crowded.bytes_per_s /= cluster.oversubscription;
    between.bytes_per_s = std::min(
        between.bytes_per_s, crowded.bytes_per_s * cluster.hosts_per_rack);
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
  CollectiveRun best = {.seconds = (ranks - 1) * step_s,
                        .sent_bytes = sent,
                        .between_hosts_bytes = sent * per_host,
                        .between_racks_bytes = sent * per_host * per_rack};

  const double leaves =
      ring_reduce_scatter_bytes(bytes, group.hosts) * per_host;
  take_faster(best,
              inside_s + ring_reduce_scatter_s(bytes, group.hosts, between),
              leaves, leaves * per_rack);
  const int levels = std::bit_width(static_cast<unsigned>(group.hosts - 1));
  take_faster(best,
              inside_s + levels * crowded.latency_s +
                  leaves / per_host / crowded.bytes_per_s,
              leaves, ring_reduce_scatter_bytes(bytes, group.racks) * per_host);
  return best;
}

const std::optional<CollectiveCost>& measured_cost(const Cluster& cluster,
                                                   Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return cluster.measured.all_gather;
    case Collective::kReduceScatter:
      return cluster.measured.reduce_scatter;
    case Collective::kAllReduce:
      break;
  }
  return cluster.measured.all_reduce;
}

}  // namespace

absl::StatusOr<Device> named_device(std::string_view name) {
  // Peaks and memory: NVIDIA's data sheets (SXM). Utilization: assumptions from
  // published runs of large transformers, FSDP on A100 (Zhao et al. 2023: 55-60
  // %) and Llama 3 on H100 (38-43 %, with its communication).
  if (name == "a100") return Device{312e12, 80e9, 2.0e12, 0.58};
  if (name == "h100") return Device{989e12, 80e9, 3.35e12, 0.5};
  if (name == "b200") return Device{2250e12, 180e9, 8e12, 0.5};
  return bad_cluster("expected device a100, h100, b200 or an object, found '",
                     std::string(name), "'");
}

absl::Status check_cluster(const Cluster& cluster) {
  if (cluster.hosts < 1 || cluster.gpus_per_host < 1 ||
      static_cast<int64_t>(cluster.hosts) * cluster.gpus_per_host > 1 << 20) {
    return bad_cluster("expected 1 to 2^20 ranks, found ", cluster.hosts,
                       " hosts with ", cluster.gpus_per_host, " GPUs each");
  }
  if (cluster.nics_per_host < 0) {
    return bad_cluster("expected nics_per_host >= 0, found ",
                       cluster.nics_per_host);
  }
  if (cluster.hosts_per_rack < 0 || cluster.hosts_per_rack > cluster.hosts) {
    return bad_cluster("expected hosts_per_rack from 0 to hosts, ",
                       cluster.hosts, ", found ", cluster.hosts_per_rack);
  }
  if (!std::isfinite(cluster.oversubscription) ||
      cluster.oversubscription < 1) {
    return bad_cluster("expected oversubscription >= 1, found ",
                       cluster.oversubscription);
  }
  if (cluster.oversubscription > 1 && cluster.hosts_per_rack == 0) {
    return bad_cluster("expected hosts_per_rack with oversubscription ",
                       cluster.oversubscription, ", found none");
  }
  if (!std::isfinite(cluster.jitter) || cluster.jitter < 0 ||
      cluster.jitter > 1) {
    return bad_cluster("expected jitter from 0 to 1, found ", cluster.jitter);
  }
  if (!std::isfinite(cluster.straggler_slowdown) ||
      cluster.straggler_slowdown < 1) {
    return bad_cluster("expected straggler_slowdown >= 1, found ",
                       cluster.straggler_slowdown);
  }
  const Device& device = cluster.device;
  for (const double number :
       {device.flops_per_s, device.memory_bytes, device.memory_bytes_per_s}) {
    if (!std::isfinite(number) || number < 0) {
      return bad_cluster("expected finite numbers >= 0 of the device, found ",
                         number);
    }
  }
  if (!(device.utilization > 0 && device.utilization <= 1)) {
    return bad_cluster("expected utilization above 0 and up to 1, found ",
                       device.utilization);
  }
  if (absl::Status status = check_link("inside", cluster.inside);
      !status.ok()) {
    return status;
  }
  return check_link("between", cluster.between);
}

double compute_slowdown(const Cluster& cluster) {
  return std::max(cluster.straggler_slowdown,
                  1 + cluster.jitter * expected_maximum(cluster.ranks()));
}

RankGroup all_ranks(const Cluster& cluster) {
  return {.hosts = cluster.hosts,
          .ranks_per_host = cluster.gpus_per_host,
          .racks = racks_of(cluster, cluster.hosts)};
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
  return bad_cluster("expected shard_ranks that divide ", gpus,
                     " GPUs per host, or multiples of them that divide ",
                     cluster.ranks(), " ranks, found ", shard_ranks);
}

RankGroup replica_group(const Cluster& cluster, int shard_ranks) {
  const int gpus = cluster.gpus_per_host;
  const int ranks_per_host = std::max(gpus / shard_ranks, 1);
  const int hosts = cluster.ranks() / shard_ranks / ranks_per_host;
  return {.hosts = hosts,
          .ranks_per_host = ranks_per_host,
          .groups_per_host = gpus / ranks_per_host,
          .racks = std::min(hosts, racks_of(cluster, cluster.hosts))};
}

CollectiveRun run_collective(Collective collective, double bytes,
                             const RankGroup& group, const Cluster& cluster) {
  if (group.ranks() == 1) return {};
  CollectiveRun run = run_phase(bytes, group, cluster);
  if (collective == Collective::kAllReduce) {
    run = {2 * run.seconds, 2 * run.sent_bytes, 2 * run.between_hosts_bytes,
           2 * run.between_racks_bytes};
    if (cluster.has_nccl_protocols) {
      const int nics = cluster.nics_per_host == 0 ? cluster.gpus_per_host
                                                  : cluster.nics_per_host;
      HostGrid grid = {group.hosts, group.ranks_per_host, cluster.inside,
                       cluster.between};
      grid.between.bytes_per_s *=
          nics / cluster.oversubscription / group.groups_per_host;
      const double seconds = nccl_all_reduce(bytes, grid).seconds;
      take_faster(run, seconds, run.between_hosts_bytes,
                  run.between_racks_bytes);
    }
  }
  if (const auto& cost = measured_cost(cluster, collective)) {
    run.seconds = cost->seconds(static_cast<int64_t>(bytes));
  }
  return run;
}

}  // namespace brigade
