// Units of one root whose gradients are reduced by some backwards only.

#include <torch/torch.h>

#include <set>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/integer_units.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace unit_sync_test {

using testing::IntegerUnits;
using testing::part_of;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const std::vector<int64_t> kNumels = {5, 9, 8};

class UnitSyncTest : public ::testing::TestWithParam<bool> {};

void expect_gradient(const ShardedRoot& root, size_t unit,
                     const at::Tensor& whole) {
  const at::Tensor& shard = root.shards_of(unit)[0];
  const at::Tensor expected =
      part_of(whole, root, unit, 0, root.unit(unit).segments[0]->rank());
  ASSERT_TRUE(shard.grad().defined()) << "unit " << unit;
  EXPECT_TRUE(at::equal(shard.grad().flatten(), expected))
      << "unit " << unit << ": " << shard.grad() << ", expected " << expected;
}

void drop_gradients(const ShardedRoot& root) {
  for (at::Tensor shard : root.shards()) shard.mutable_grad() = at::Tensor();
}

// The average over ranks of what batches have added up.
at::Tensor average(const IntegerUnits& net, size_t unit, int num_ranks,
                   int num_batches) {
  at::Tensor sum = torch::zeros_like(net.parameters[unit]);
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int batch = 0; batch < num_batches; ++batch) {
      sum += net.gradient(unit, rank, batch);
    }
  }
  return sum.detach() / num_ranks;
}

// `GetParam()`: units stay whole from forward to backward.
TEST_P(UnitSyncTest, OneAddsUpOnThisRankWhileOthersAreReduced) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group,
                     {.reshards_after_forward = !GetParam()});
    for (int step = 0; step < 2; ++step) {
      for (int batch = 0; batch < 3; ++batch) {
        root.settings(1).synchronizes = batch == 2;
        net.run(root, rank, batch).backward();
        EXPECT_EQ(root.shards_of(1)[0].grad().defined(), batch == 2);
        expect_gradient(root, 0, average(net, 0, 2, batch + 1));
        EXPECT_EQ(root.holds_gradients(), batch < 2);
      }
      expect_gradient(root, 1, average(net, 1, 2, 3));
      expect_gradient(root, 2, average(net, 2, 2, 3));
      drop_gradients(root);
    }
  });
}

TEST_P(UnitSyncTest, RowsOfOneAddUpAloneWhileOthersAreSummedOverAll) {
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group,
                     {.num_shards = 2, .reshards_after_forward = !GetParam()});
    for (int step = 0; step < 2; ++step) {
      for (int batch = 0; batch < 2; ++batch) {
        root.settings(2).sums_over_replicas = batch == 1;
        net.run(root, rank, batch).backward();
        EXPECT_EQ(root.shards_of(2)[0].grad().defined(), batch == 1);
        expect_gradient(root, 1, average(net, 1, 4, batch + 1));
      }
      expect_gradient(root, 2, average(net, 2, 4, 2));
      drop_gradients(root);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Resharding, UnitSyncTest, ::testing::Bool());

TEST(UnitSyncOrdersTest, WithoutAnyABackwardReducesNothing) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {});
    for (size_t unit = 0; unit < 3; ++unit) {
      root.settings(unit).synchronizes = false;
    }
    net.run(root, rank, 0).backward();
    EXPECT_THROW(root.reduce(), c10::Error);
    EXPECT_EQ(root.engine_statistics().reduced, 0);
    root.settings(0).synchronizes = root.settings(2).synchronizes = true;
    root.reduce();  // of the two
    expect_gradient(root, 0, average(net, 0, 2, 1));
    expect_gradient(root, 2, average(net, 2, 2, 1));
    EXPECT_FALSE(root.shards_of(1)[0].grad().defined());
    root.settings(1).synchronizes = true;
    root.reduce();
    expect_gradient(root, 1, average(net, 1, 2, 1));
    expect_gradient(root, 0, average(net, 0, 2, 1));  // added nothing
  });
}

// Other branches on each rank, so that they sum what they have used again and
// again, over many backwards.
TEST(UnitSyncOrdersTest, WhatOneRankHasUsedLongAgoIsReduced) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {});
    root.settings(1).synchronizes = false;
    const auto run = [&](int batch, std::set<size_t> left_out) {
      if (rank == 1) left_out.insert(2);
      net.run(root, rank, batch, left_out).backward();
    };
    if (rank == 0) {
      run(0, {});
    } else {
      run(0, {1});
    }
    for (int batch = 0; batch < 40; ++batch) run(0, {1});
    root.settings(1).synchronizes = true;
    run(0, {1});
    expect_gradient(root, 1, net.gradient(1, 0, 0).detach() / 2);
    EXPECT_FALSE(root.holds_gradients());
    drop_gradients(root);
    run(0, {1});
    EXPECT_FALSE(root.shards_of(1)[0].grad().defined());
  });
}

TEST(UnitSyncOrdersTest, UnitsThatDifferOnOneRankAreAnErrorOnAll) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {});
    for (const bool synchronizes : {true, false}) {
      for (size_t unit = 0; unit < 3; ++unit) {
        UnitSettings& settings = root.settings(unit);
        settings.synchronizes = synchronizes;
        if (unit == 1 && rank == 1) settings.synchronizes = !synchronizes;
      }
      EXPECT_THROW(net.run(root, rank, 0).backward(), c10::Error);
      for (size_t unit = 0; unit < 3; ++unit) {
        root.settings(unit).synchronizes = true;
      }
      net.run(root, rank, 0).backward();
      expect_gradient(root, 1, average(net, 1, 2, 1));
      drop_gradients(root);
    }
  });
}

TEST(UnitSyncOrdersTest, AFailureDropsWhatOneHasAddedUp) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {});
    root.settings(1).synchronizes = false;
    net.run(root, rank, 0).backward();
    drop_gradients(root);
    EXPECT_ANY_THROW({
      const at::Tensor loss = net.run(root, rank, 1);
      loss.register_hook([&](const at::Tensor& gradient) -> at::Tensor {
        TORCH_CHECK(rank == 0, "no luck");
        return gradient;
      });
      loss.backward();
    });
    EXPECT_FALSE(root.holds_gradients());
    root.settings(1).synchronizes = true;
    net.run(root, rank, 0).backward();
    expect_gradient(root, 1, average(net, 1, 2, 1));
  });
}

}  // namespace unit_sync_test
}  // namespace brigade
