#include "brigade/fsdp/sharding_options.h"

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "brigade/tests/fsdp/integer_units.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharding_options_test {

using testing::IntegerUnits;
using testing::run_ranks;
using testing::whole_bytes_of;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWorldSize = 2;
constexpr int kBatches = 3;
const std::vector<int64_t> kNumels = {12, 24, 36};

struct Counts {
  int64_t gathers;  // of all parameters
  int64_t sums;     // of all gradients
  bool stays_whole;

  friend bool operator==(const Counts&, const Counts&) = default;
};

// Of one step of the optimizer, of several batches.
Counts counts_of_step(ShardedRoot& root, const IntegerUnits& net, int rank,
                      bool accumulates) {
  const ShardingStatistics before = root.statistics();
  for (int batch = 0; batch < kBatches; ++batch) {
    root.set_synchronizes(!accumulates || batch == kBatches - 1);
    net.run(root, rank, batch).backward();
  }
  const ShardingStatistics after = root.statistics();
  const int64_t all = whole_bytes_of(root) / kWorldSize * (kWorldSize - 1);
  EXPECT_EQ((after.sent_by_gathers - before.sent_by_gathers) % all, 0);
  EXPECT_EQ((after.sent_by_sums - before.sent_by_sums) % all, 0);
  return {.gathers = (after.sent_by_gathers - before.sent_by_gathers) / all,
          .sums = (after.sent_by_sums - before.sent_by_sums) / all,
          .stays_whole = root.unit(0).segments[0]->is_bound()};
}

void expect_gradients_and_step(ShardedRoot& root, const IntegerUnits& net) {
  const torch::NoGradGuard no_grad;
  for (size_t unit = 0; unit < root.num_units(); ++unit) {
    at::Tensor sum = torch::zeros({kNumels[unit]});
    for (int rank = 0; rank < kWorldSize; ++rank) {
      for (int batch = 0; batch < kBatches; ++batch) {
        sum += net.gradient(unit, rank, batch);
      }
    }
    at::Tensor shard = root.shards_of(unit)[0];
    const at::Tensor expected =
        (sum / kWorldSize)
            .narrow(0, root.shard_rank() * shard.numel(), shard.numel());
    EXPECT_TRUE(at::equal(shard.grad(), expected));
    shard.sub_(shard.grad());
    shard.mutable_grad() = at::Tensor();
  }
}

void expect_counts(const ShardingOptions& options, bool accumulates,
                   const Counts& expected) {
  run_ranks(kWorldSize, [&](const Group& group) {
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, options);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(counts_of_step(root, net, group->getRank(), accumulates),
                expected)
          << "step " << step;
      expect_gradients_and_step(root, net);
    }
    EXPECT_EQ(root.statistics().late_gathers, 0);
  });
}

TEST(ShardingStrategyTest, AllIsGatheredTwiceForEachBatch) {
  expect_counts({}, false, {6, 3, false});
  expect_counts({}, true, {6, 1, false});
}

TEST(ShardingStrategyTest, ShardedGradientsAreSummedForEachBatch) {
  expect_counts(shard_gradients(), false, {3, 3, false});
  expect_counts(shard_gradients(), true, {3, 1, false});
}

TEST(ShardingStrategyTest, ShardedOptimizerStateIsGatheredOnceForEachStep) {
  const ShardingOptions options =
      shard_optimizer_state({.trusts_versions = true});
  expect_counts(options, false, {1, 3, true});
  expect_counts(options, true, {1, 1, true});
}

TEST(ShardingStrategyTest, KeepsTheOtherOptions) {
  const ShardingOptions options = shard_optimizer_state(
      ShardingOptions{.prefetch_depth = 3, .param_dtype = at::kHalf});
  EXPECT_EQ(options.prefetch_depth, 3u);
  EXPECT_EQ(options.param_dtype, at::kHalf);
  EXPECT_FALSE(options.reshards_after_backward);
  EXPECT_TRUE(shard_gradients().reshards_after_backward);
}

// All ranks of these tests are on one.
TEST(ShardingStrategyTest, HybridShardsAreThoseOfAHost) {
  run_ranks(2, [](const Group& group) {
    const ShardingOptions on_host =
        hybrid_shard(group, ShardingOptions{.prefetch_depth = 3});
    EXPECT_EQ(on_host.num_shards, 2);
    EXPECT_EQ(on_host.prefetch_depth, 3u);
    EXPECT_EQ(hybrid_shard(group, ShardingOptions{.num_shards = 1}).num_shards,
              1);
  });
}

}  // namespace sharding_options_test
}  // namespace brigade
