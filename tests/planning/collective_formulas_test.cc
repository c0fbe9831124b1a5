// Published times of collectives, each within 5 % of the printed figure.

#include "brigade/planning/collective_formulas.h"

#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

constexpr double kGB = 1e9;

void expect_published(double seconds, double printed) {
  EXPECT_NEAR(seconds, printed, 0.05 * printed);
}

LinkSpeed speed_of(const std::string& name) {
  const auto link = named_link(name);
  EXPECT_TRUE(link.ok()) << link.status();
  return *link;
}

LinkSpeed without_latency(LinkSpeed link) { return {0, link.bytes_per_s}; }

TEST(CollectiveFormulasTest, LinksHaveNames) {
  EXPECT_EQ(speed_of("nvlink4").bytes_per_s, 450e9);
  EXPECT_EQ(std::string(named_link("nvlink").status().message()).substr(0, 30),
            "link: expected one of pcie4, n");
}

TEST(CollectiveFormulasTest, AParameterServerAndARing) {
  const LinkSpeed link = {0, 25e9};
  expect_published(parameter_server_s(kGB, 4, link), 0.16 + 0.16);
  expect_published(ring_all_reduce_s(kGB, 4, link), 0.06);
  // The source counts one direction of the server's link.
  const double ratio =
      parameter_server_s(kGB, 100, link) / ring_all_reduce_s(kGB, 100, link);
  expect_published(ratio / 2, 50);
  expect_published(ratio, 101);
}

// The source prices a ring as 2 * bytes / bandwidth: an endless ring.
TEST(CollectiveFormulasTest, EndlessRings) {
  const auto endless_s = [](const std::string& link) {
    return ring_all_reduce_s(kGB, 1 << 20, without_latency(speed_of(link)));
  };
  expect_published(endless_s("nvlink4"), 4.4e-3);
  expect_published(6e-3 + endless_s("hdr"), 86e-3);
  expect_published(6e-3 + endless_s("ndr"), 46e-3);
  expect_published(endless_s("ethernet1"), 16);
  expect_published(endless_s("nvlink4") / 8, 0.57e-3);  // 8 channels
  // Counted exactly, for 8 ranks:
  expect_published(
      ring_all_reduce_s(kGB, 8, without_latency(speed_of("nvlink4"))), 3.9e-3);
}

TEST(CollectiveFormulasTest, TheRooflineOfSixSteps) {
  const LinkSpeed link = {50e-6, 450e9};
  expect_published(roofline_s(1e6, 6, link), 300e-6);
  expect_published(roofline_s(kGB, 6, link), 2.2e-3);
}

TEST(CollectiveFormulasTest, ARingSendsTwiceTheRedundantBytes) {
  for (const int ranks : {1, 2, 3, 8, 100}) {
    // Replication holds bytes * (ranks - 1) / ranks per rank too much.
    const double redundant = kGB - kGB / ranks;
    EXPECT_DOUBLE_EQ(ring_reduce_scatter_bytes(kGB, ranks), redundant);
    EXPECT_DOUBLE_EQ(ring_all_reduce_bytes(kGB, ranks), 2 * redundant);
  }
}

TEST(CollectiveFormulasTest, ATreeIsFasterForSmallTensorsAndManyRanks) {
  const LinkSpeed link = {10e-6, 10e9};
  EXPECT_LT(tree_all_reduce_s(1e3, 64, link), ring_all_reduce_s(1e3, 64, link));
  EXPECT_GT(tree_all_reduce_s(1e9, 64, link), ring_all_reduce_s(1e9, 64, link));
  // A double tree loses the ring's 1 / ranks of bandwidth only.
  EXPECT_LT(double_tree_all_reduce_s(1e9, 64, link),
            1.02 * ring_all_reduce_s(1e9, 64, link));
}

TEST(CollectiveFormulasTest, ARingIsAsSlowAsItsSlowestLink) {
  const LinkSpeed fast = {0, 100e9};
  const LinkSpeed slow = {0, 10e9};
  const std::vector<LinkSpeed> links = {fast, slow, fast, fast};
  EXPECT_DOUBLE_EQ(ring_all_reduce_s(kGB, links),
                   ring_all_reduce_s(kGB, 4, slow));
  const HostGrid grid = {
      .hosts = 2, .ranks_per_host = 4, .inside = fast, .between = slow};
  EXPECT_DOUBLE_EQ(flat_all_reduce_s(kGB, grid), 2 * 7.0 / 8 / 10);
  // Half of the bytes cross, once in each direction.
  EXPECT_DOUBLE_EQ(hierarchical_all_reduce_s(kGB, grid),
                   2 * 3.0 / 4 / 100 + 1.0 / 10);
}

TEST(CollectiveFormulasTest, NcclTakesTreesAndLLForSmallTensors) {
  const HostGrid grid = {.hosts = 16,
                         .ranks_per_host = 8,
                         .inside = speed_of("nvlink4"),
                         .between = speed_of("ndr")};
  const NcclChoice small = nccl_all_reduce(1e3, grid);
  EXPECT_EQ(small.algorithm, NcclAlgorithm::kTree);
  EXPECT_EQ(small.protocol, NcclProtocol::kLL);
  const NcclChoice large = nccl_all_reduce(10e9, grid);
  EXPECT_EQ(large.algorithm, NcclAlgorithm::kRing);
  EXPECT_EQ(large.protocol, NcclProtocol::kSimple);
  EXPECT_EQ(nccl_all_reduce(1, {}).seconds, 0);
  // 14 hops of 0.6 us, and 6.6 us.
  EXPECT_NEAR(
      nccl_all_reduce(
          0, {.hosts = 1, .ranks_per_host = 8, .inside = speed_of("nvlink4")})
          .seconds,
      15e-6, 1e-9);
  double last_s = 0;
  for (double bytes = 1; bytes < 1e11; bytes *= 3) {
    const double seconds = nccl_all_reduce(bytes, grid, false).seconds;
    EXPECT_GE(seconds, last_s);
    last_s = seconds;
  }
}

}  // namespace
}  // namespace brigade
