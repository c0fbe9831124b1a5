#include "brigade/planning/collective_formulas.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace brigade {
namespace {

// Levels of a binary tree above its leaves.
int levels(int ranks) {
  return std::bit_width(static_cast<unsigned>(ranks - 1));
}

struct NcclLatencies {
  double base_s = 0;
  double nvlink_s = 0;
  double pcie_s = 0;
  double network_s = 0;
};

// By algorithm, then by protocol.
constexpr std::array<std::array<NcclLatencies, 3>, 2> kNcclLatencies = {{
    {{{6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6},
      {14e-6, 1.9e-6, 2.5e-6, 4.0e-6},
      {8.4e-6, 3.4e-6, 5.7e-6, 14e-6}}},
    {{{6.8e-6, 0.6e-6, 1.0e-6, 5.0e-6},
      {14e-6, 1.25e-6, 1.9e-6, 8.5e-6},
      {8.4e-6, 4.0e-6, 4.0e-6, 14e-6}}},
}};
constexpr std::array<double, 3> kNcclShare = {0.5, 120.0 / 128, 1};

double nccl_seconds(double bytes, const HostGrid& grid, bool has_nvlink,
                    NcclAlgorithm algorithm, NcclProtocol protocol) {
  const auto of_protocol = static_cast<size_t>(protocol);
  const NcclLatencies& latency =
      kNcclLatencies[static_cast<size_t>(algorithm)][of_protocol];
  const double hop_s = has_nvlink ? latency.nvlink_s : latency.pcie_s;
  double bytes_per_s =
      grid.hosts == 1 ? grid.inside.bytes_per_s
      : grid.ranks_per_host == 1
          ? grid.between.bytes_per_s
          : std::min(grid.inside.bytes_per_s, grid.between.bytes_per_s);
  bytes_per_s *= kNcclShare[of_protocol];
  if (algorithm == NcclAlgorithm::kRing) {
    const int network_hops = grid.hosts == 1 ? 0 : 2 * (grid.hosts - 1);
    const int hops = 2 * (grid.ranks() - 1) - network_hops;
    return latency.base_s + hops * hop_s + network_hops * latency.network_s +
           ring_all_reduce_bytes(bytes, grid.ranks()) / bytes_per_s;
  }
  return latency.base_s + 2 * (grid.ranks_per_host - 1) * hop_s +
         2 * levels(grid.hosts) * latency.network_s + 2 * bytes / bytes_per_s;
}

}  // namespace

absl::StatusOr<LinkSpeed> named_link(std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, LinkSpeed>, 11>
      kLinks = {{{"pcie4", {5.7e-6, 32e9}},
                 {"nvlink3", {3.4e-6, 300e9}},
                 {"nvlink4", {3.4e-6, 450e9}},
                 {"nvlink5", {3.4e-6, 900e9}},
                 {"hdr", {14e-6, 25e9}},
                 {"ndr", {14e-6, 50e9}},
                 {"roce100", {14e-6, 12.5e9}},
                 {"ethernet1", {50e-6, 0.125e9}},
                 {"ethernet10", {50e-6, 1.25e9}},
                 {"ethernet25", {50e-6, 3.125e9}},
                 {"ethernet100", {50e-6, 12.5e9}}}};
  std::string names;
  for (const auto& [known, speed] : kLinks) {
    if (known == name) return speed;
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(known));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "link: expected one of ", names, ", found '", std::string(name), "'"));
}

double ring_reduce_scatter_bytes(double bytes, int ranks) {
  return bytes * (ranks - 1) / ranks;
}

double ring_all_reduce_bytes(double bytes, int ranks) {
  return 2 * ring_reduce_scatter_bytes(bytes, ranks);
}

double ring_reduce_scatter_s(double bytes, int ranks, LinkSpeed link) {
  return (ranks - 1) * link.latency_s +
         ring_reduce_scatter_bytes(bytes, ranks) / link.bytes_per_s;
}

double ring_all_reduce_s(double bytes, int ranks, LinkSpeed link) {
  return 2 * ring_reduce_scatter_s(bytes, ranks, link);
}

double ring_all_reduce_s(double bytes, std::span<const LinkSpeed> links) {
  const auto ranks = static_cast<double>(links.size());
  double step_s = 0;
  for (const LinkSpeed& link : links) {
    step_s =
        std::max(step_s, link.latency_s + bytes / ranks / link.bytes_per_s);
  }
  return 2 * (ranks - 1) * step_s;
}

double tree_all_reduce_s(double bytes, int ranks, LinkSpeed link) {
  return 2 * levels(ranks) * (link.latency_s + bytes / link.bytes_per_s);
}

double double_tree_all_reduce_s(double bytes, int ranks, LinkSpeed link) {
  if (ranks == 1) return 0;
  return 2 * (levels(ranks) * link.latency_s + bytes / link.bytes_per_s);
}

double all_to_all_s(double bytes, int ranks, LinkSpeed link) {
  return ring_reduce_scatter_s(bytes, ranks, link);
}

double parameter_server_s(double bytes, int workers, LinkSpeed server) {
  return 2 * (server.latency_s + workers * bytes / server.bytes_per_s);
}

double roofline_s(double bytes, int steps, LinkSpeed link) {
  return std::max(bytes / link.bytes_per_s, steps * link.latency_s);
}

double hierarchical_all_reduce_s(double bytes, const HostGrid& grid) {
  // The rings of a host's ranks share its link, each with a part of the bytes.
  return 2 * ring_reduce_scatter_s(bytes, grid.ranks_per_host, grid.inside) +
         ring_all_reduce_s(bytes, grid.hosts, grid.between);
}

double flat_all_reduce_s(double bytes, const HostGrid& grid) {
  std::vector<LinkSpeed> links(grid.ranks(), grid.inside);
  for (int host = 0; grid.hosts > 1 && host < grid.hosts; ++host) {
    links[(host + 1) * grid.ranks_per_host - 1] = grid.between;
  }
  return ring_all_reduce_s(bytes, links);
}

NcclChoice nccl_all_reduce(double bytes, const HostGrid& grid,
                           bool has_nvlink) {
  if (grid.ranks() == 1) return {};
  NcclChoice best = {.seconds = std::numeric_limits<double>::infinity()};
  for (const auto algorithm : {NcclAlgorithm::kRing, NcclAlgorithm::kTree}) {
    for (const auto protocol :
         {NcclProtocol::kLL, NcclProtocol::kLL128, NcclProtocol::kSimple}) {
      if (protocol == NcclProtocol::kLL128 && !has_nvlink) continue;
      const double seconds =
          nccl_seconds(bytes, grid, has_nvlink, algorithm, protocol);
      if (seconds < best.seconds) best = {algorithm, protocol, seconds};
    }
  }
  return best;
}

}  // namespace brigade
