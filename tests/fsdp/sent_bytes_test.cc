// Bytes that a rank sends in a step, of n bytes of parameters on W ranks,
// against the 2 (W - 1) / W n of data parallelism.

#include <torch/torch.h>

#include <cstdint>
#include <ostream>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/integer_units.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sent_bytes_test {

using testing::IntegerUnits;
using testing::run_ranks;
using testing::whole_bytes_of;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Divided by 2, 3 and 4 ranks, and too long for an all-reduce in one phase.
const std::vector<int64_t> kNumels = {12'000, 24'000, 36'000};

struct Sent {
  int64_t by_gathers;
  int64_t by_sums;

  friend bool operator==(const Sent&, const Sent&) = default;
};

// What `run` sends.
template <typename Run>
Sent sent_by(const ShardedRoot& root, const Run& run) {
  const ShardingStatistics before = root.statistics();
  run();
  const ShardingStatistics after = root.statistics();
  return {.by_gathers = after.sent_by_gathers - before.sent_by_gathers,
          .by_sums = after.sent_by_sums - before.sent_by_sums};
}

Sent sent_by_step(ShardedRoot& root, const IntegerUnits& net, int rank) {
  return sent_by(root, [&] { net.run(root, rank, 0).backward(); });
}

std::ostream& operator<<(std::ostream& out, const Sent& sent) {
  return out << "gathers " << sent.by_gathers << ", sums " << sent.by_sums;
}

TEST(SentBytesTest, FullShardsSendHalfAsMuchAgainAsAnAllReduce) {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [&](const Group& group) {
      const IntegerUnits net(kNumels);
      ShardedRoot root(net.units(), group, {});
      const int64_t n = whole_bytes_of(root);
      const int64_t once = n / world_size * (world_size - 1);
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(sent_by_step(root, net, group->getRank()),
                  (Sent{.by_gathers = 2 * once, .by_sums = once}));
      }
    });
  }
}

TEST(SentBytesTest, KeptParametersSendAsMuchAsAnAllReduce) {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [&](const Group& group) {
      const IntegerUnits net(kNumels);
      ShardedRoot root(net.units(), group, {.reshards_after_forward = false});
      const int64_t once = whole_bytes_of(root) / world_size * (world_size - 1);
      EXPECT_EQ(sent_by_step(root, net, group->getRank()),
                (Sent{.by_gathers = once, .by_sums = once}));
    });
  }
}

TEST(SentBytesTest, WholeParametersSendAnAllReduce) {
  for (const int world_size : {2, 3, 4}) {
    run_ranks(world_size, [&](const Group& group) {
      const IntegerUnits net(kNumels);
      ShardedRoot root(net.units(), group, {.num_shards = 1});
      const int64_t once = whole_bytes_of(root) / world_size * (world_size - 1);
      EXPECT_EQ(sent_by_step(root, net, group->getRank()),
                (Sent{.by_gathers = 0, .by_sums = 2 * once}));
    });
  }
}

// Forward's over all, backward's among two neighbours.
TEST(SentBytesTest, GathersAmongNeighboursSendLess) {
  run_ranks(4, [&](const Group& group) {
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {.reshards_to = 2});
    const int64_t n = whole_bytes_of(root);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(sent_by_step(root, net, group->getRank()),
                (Sent{.by_gathers = n / 4 * 3 + n / 2, .by_sums = n / 4 * 3}));
    }
  });
}

// As a ring among so many.
TEST(SentBytesTest, AGroupsOwnGathersAreCountedByTheirRanks) {
  const RecordingGroup recording(6);
  const IntegerUnits net(kNumels);
  ShardedRoot root(net.units(), recording.group(), {.reshards_to = 3});
  const int64_t n = whole_bytes_of(root);
  EXPECT_EQ(sent_by_step(root, net, 0),
            (Sent{.by_gathers = n / 6 * 5 + n / 3 * 2, .by_sums = n / 6 * 5}));
}

// Over a row of two, and a shard over a column of two.
TEST(SentBytesTest, ReplicasSendTheirShardsOnly) {
  run_ranks(4, [&](const Group& group) {
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {.num_shards = 2});
    const int64_t n = whole_bytes_of(root);
    const int64_t in_row = n / 2;
    const int64_t in_column = 2 * (n / 2) / 2;
    const int rank = group->getRank();
    EXPECT_EQ(sent_by_step(root, net, rank),
              (Sent{.by_gathers = 2 * in_row, .by_sums = in_row + in_column}));
    root.set_sums_over_replicas(false);
    EXPECT_EQ(sent_by_step(root, net, rank),
              (Sent{.by_gathers = 2 * in_row, .by_sums = in_row}));
    root.set_sums_over_replicas(true);
    EXPECT_EQ(sent_by_step(root, net, rank),
              (Sent{.by_gathers = 2 * in_row, .by_sums = in_row + in_column}));
  });
}

TEST(SentBytesTest, AccumulationSendsNoGradients) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {});
    const int64_t once = whole_bytes_of(root) / 2;
    root.set_synchronizes(false);
    for (int batch = 0; batch < 3; ++batch) {
      EXPECT_EQ(sent_by_step(root, net, rank),
                (Sent{.by_gathers = 2 * once, .by_sums = 0}));
    }
    root.set_synchronizes(true);
    EXPECT_EQ(sent_by_step(root, net, rank),
              (Sent{.by_gathers = 2 * once, .by_sums = once}));
  });
}

// What is compared, counted and clipped beside the parameters.
TEST(SentBytesTest, WhatRanksAskEachOtherIsNotCounted) {
  run_ranks(2, [&](const Group& group) {
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {});
    net.run(root, group->getRank(), 0).backward();
    EXPECT_EQ(sent_by(root,
                      [&] {
                        root.clip_grad_norm(1);
                        root.num_ranks_with(true);
                      }),
              (Sent{.by_gathers = 0, .by_sums = 0}));
    EXPECT_EQ(sent_by(root,
                      [&] {
                        root.unshard();
                        root.reshard(/*writes=*/false);
                      }),
              (Sent{.by_gathers = whole_bytes_of(root) / 2, .by_sums = 0}));
  });
}

}  // namespace sent_bytes_test
}  // namespace brigade
