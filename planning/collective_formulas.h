// Formulas for the time of collectives on known links, and links by name.
//
//   const LinkSpeed nic = *named_link("hdr");
//   ring_all_reduce_s(1'000'000'000, 8, nic);  // 70 ms
//
// Sizes are bytes of the whole tensor (of an all-gather: of its output), times
// are seconds. A world of 1 takes no time.
//
// REQUIRES: bytes >= 0, ranks >= 1, bandwidths > 0.
//
// Thread safety: functions are pure.

#ifndef BRIGADE_PLANNING_COLLECTIVE_FORMULAS_H_
#define BRIGADE_PLANNING_COLLECTIVE_FORMULAS_H_

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

// One direction of a link.
struct LinkSpeed {
  double latency_s = 0;  // of a message between neighbours
  double bytes_per_s = 0;
};

// Names, bandwidths in GB/s, latencies in us: "pcie4" 32, 5.7; "nvlink3" 300,
// 3.4; "nvlink4" 450, 3.4; "nvlink5" 900, 3.4; "hdr" 25, "ndr" 50,
// "roce100" 12.5, 14 each; "ethernet1", "ethernet10", "ethernet25",
// "ethernet100" 0.125 to 12.5, 50. Bandwidths are the vendors' for one GPU or
// NIC; latencies are NCCL's for the Simple protocol, and an estimate for TCP.
//
// Errors: InvalidArgument for another name.
absl::StatusOr<LinkSpeed> named_link(std::string_view name);

// ---- Bytes that each rank sends. No all-reduce sends less than the ring's.

double ring_reduce_scatter_bytes(double bytes, int ranks);
double ring_all_reduce_bytes(double bytes, int ranks);

// ---- One level.

// Reduce-scatter or all-gather.
double ring_reduce_scatter_s(double bytes, int ranks, LinkSpeed link);
double ring_all_reduce_s(double bytes, int ranks, LinkSpeed link);
// `links[i]` joins rank i and rank i + 1; the last joins the ends. Every step
// takes as long as the slowest of them.
double ring_all_reduce_s(double bytes, std::span<const LinkSpeed> links);
// Reduction to a root and broadcast, level by level.
double tree_all_reduce_s(double bytes, int ranks, LinkSpeed link);
// Two trees that carry half each, in pipelined pieces (Sanders et al. 2009).
double double_tree_all_reduce_s(double bytes, int ranks, LinkSpeed link);
// Each rank sends a part of its tensor to each other one.
double all_to_all_s(double bytes, int ranks, LinkSpeed link);
// Workers send to one server and receive from it, one way after the other.
double parameter_server_s(double bytes, int workers, LinkSpeed server);
// No steps overlap with transfers, or all do: max(bytes / bandwidth,
// latencies).
double roofline_s(double bytes, int steps, LinkSpeed link);

// ---- Two levels.

struct HostGrid {
  int hosts = 1;
  int ranks_per_host = 1;
  LinkSpeed inside = {};
  LinkSpeed between = {};  // of a host, shared by its ranks

  int ranks() const { return hosts * ranks_per_host; }
};

// Reduce-scatter in each host, all-reduces between hosts, all-gather in each.
double hierarchical_all_reduce_s(double bytes, const HostGrid& grid);
// One ring through all ranks, those of a host next to each other.
double flat_all_reduce_s(double bytes, const HostGrid& grid);

// ---- NCCL.

enum class NcclProtocol : uint8_t { kLL, kLL128, kSimple };
enum class NcclAlgorithm : uint8_t { kRing, kTree };

struct NcclChoice {
  NcclAlgorithm algorithm = NcclAlgorithm::kRing;
  NcclProtocol protocol = NcclProtocol::kSimple;
  double seconds = 0;
};

// All-reduce as NCCL's tuner estimates it: latency of the hops plus bytes over
// the bandwidth that a protocol leaves: LL half, LL128 120/128 (hosts with
// NVLink only), Simple all. Returns the fastest choice.
//
// Latencies: NCCL, src/graph/tuning.cc, 2026. Differs: no correction factors of
// trees by size, no limits of one GPU generation.
NcclChoice nccl_all_reduce(double bytes, const HostGrid& grid,
                           bool has_nvlink = true);

}  // namespace brigade

#endif  // BRIGADE_PLANNING_COLLECTIVE_FORMULAS_H_
