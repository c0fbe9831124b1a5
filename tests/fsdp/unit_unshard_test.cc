// One unit that is whole while its root trains on.

#include <torch/torch.h>

#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace unit_unshard_test {

using testing::expect_gradients;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::message_of;
using testing::Net;
using testing::Reference;
using testing::run_ranks;
using testing::sgd;
using testing::train_step;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr size_t kUnit = 1;  // block 0

void reduce_alike(Reference& reference, const Net& plain, int step) {
  reference.accumulate(
      2, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
}

TEST(UnitUnshardTest, OneUnitIsReadAndWritten) {
  run_ranks(2, [&](const Group& group) {
    Net plain;
    Net net;
    ShardedRoot root(net.units(), group, {});
    EXPECT_FALSE(root.await_unit(kUnit));
    root.unshard(kUnit);
    EXPECT_TRUE(root.await_unit(kUnit));
    EXPECT_TRUE(at::equal(net.blocks[0].weight, plain.blocks[0].weight));
    EXPECT_THAT(message_of([&] { net.blocks[1].weight.sum(); }),
                HasSubstr("the parameters of unit 'blocks.1' are sharded"));
    {
      const torch::NoGradGuard no_grad;
      net.blocks[0].weight.fill_(2);
    }
    root.reshard(kUnit, /*writes=*/true);
    EXPECT_THAT(message_of([&] { net.blocks[0].weight.sum(); }),
                HasSubstr("the parameters of unit 'blocks.0' are sharded"));
    EXPECT_TRUE((root.shards_of(kUnit)[0] == 2).all().item<bool>());
    root.unshard(kUnit);
    root.reshard(kUnit, /*writes=*/false);  // while its gather is under way
    EXPECT_FALSE(root.await_unit(kUnit));
    EXPECT_TRUE((root.shards_of(kUnit)[0] == 2).all().item<bool>());
  });
}

// Before a forward, between forward and backward, and behind the optimizer.
TEST(UnitUnshardTest, ItTrainsOnToTheSameBits) {
  for (const bool reshards : {true, false}) {
    for (const size_t depth : {0, 1, 3}) {
      run_ranks(2, [&](const Group& group) {
        const int rank = group->getRank();
        Net plain;
        Net net;
        Reference reference(plain);
        ShardedRoot root(
            net.units(), group,
            {.reshards_after_forward = reshards, .prefetch_depth = depth});
        for (int step = 0; step < 4; ++step) {
          if (step != 1) root.unshard(kUnit);
          if (step == 3) root.shards_changed();  // it is out of date
          at::Tensor loss = loss_of(root.forward(
              [&] { return net.run(root, net.input(rank, step)); }));
          EXPECT_EQ(root.await_unit(kUnit), !reshards);
          if (step == 2) {
            root.unshard(kUnit);
            root.unshard(kUnit + 1);
            EXPECT_TRUE(root.await_unit(kUnit));
            root.reshard(kUnit + 1, /*writes=*/false);
          }
          loss.backward();
          EXPECT_FALSE(root.await_unit(kUnit));
          reduce_alike(reference, plain, step);
          expect_gradients(root, reference.gradients, rank);
          reference.step(0.1);
          sgd(root.shards(), 0.1);
        }
        EXPECT_EQ(root.statistics().late_gathers, 0);
      });
    }
  }
}

TEST(UnitUnshardTest, InsideOfAForwardAGatherBeginsAheadOfItsNeed) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {.prefetch_depth = 0});
    for (int step = 0; step < 3; ++step) {
      loss_of(root.forward([&] {
        for (size_t unit = 1; unit < root.num_units(); ++unit) {
          root.unshard(unit);
        }
        root.reshard(kUnit, /*writes=*/false);  // and so it is late
        return net.run(root, net.input(rank, step));
      })).backward();
      reduce_alike(reference, plain, step);
      expect_gradients(root, reference.gradients, rank);
      reference.step(0.1);
      sgd(root.shards(), 0.1);
      EXPECT_EQ(root.statistics().late_gathers, 1);  // later ones expect it
    }
  });
}

TEST(UnitUnshardTest, WhatAForwardLeavesOutIsReleasedBehindIt) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net({4, 4, 4});
    ShardedRoot root(net.units(), group, {});
    int num_released = 0;
    root.unshard(kUnit);
    root.await_unit(kUnit, [&] { ++num_released; });
    root.forward([&] { return net.run(root, net.input(rank, 0), {1}); });
    EXPECT_EQ(num_released, 1);
    EXPECT_FALSE(root.await_unit(kUnit));
    train_step(root, net, rank, 0);
    EXPECT_EQ(num_released, 1);
  });
}

TEST(UnitUnshardTest, RanksThatDoSomethingElseAllRaise) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {});
    const auto forward = [&] {
      root.forward([&] { return net.run(root, net.input(rank, 0)); });
    };
    const std::string of_two = message_of([&] { root.unshard(kUnit + rank); });
    EXPECT_THAT(of_two, HasSubstr("unshards unit 'blocks.0'"));
    EXPECT_THAT(of_two, HasSubstr("unshards unit 'blocks.1'"));
    const std::string of_one = message_of([&] {
      if (rank == 0) root.unshard(kUnit);
      if (rank == 1) forward();
    });
    EXPECT_THAT(of_one, HasSubstr("unshards unit 'blocks.0'"));
    EXPECT_THAT(of_one, HasSubstr("began a forward"));
    root.unshard(kUnit);
    if (rank == 0) root.reshard(kUnit, /*writes=*/false);
    EXPECT_THAT(message_of(forward), HasSubstr("began a forward"));
    train_step(root, net, rank, 0);
    EXPECT_TRUE(root.shards()[0].grad().defined());
  });
}

TEST(UnitUnshardTest, StorageThatIsKeptHasOneAddressByPlan) {
  for (const size_t depth : {0, 1}) {
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      Net net({8, 8, 8, 8});
      ShardedRoot root(net.units(), group, {.prefetch_depth = depth});
      root.settings(kUnit).keeps_storage = true;
      const void* address = nullptr;
      for (int step = 0; step < 3; ++step) {
        loss_of(root.forward([&] {
          return root.call(0, net.input(rank, step), [&](const at::Tensor& x) {
            at::Tensor h = root.call(kUnit, x, [&](const at::Tensor& in) {
              const void* found = net.blocks[0].weight.const_data_ptr();
              if (address == nullptr) address = found;
              EXPECT_EQ(found, address);
              return net.blocks[0].run(in);
            });
            for (size_t unit = 2; unit < root.num_units(); ++unit) {
              h = root.call(unit, h, [&](const at::Tensor& in) {
                return net.blocks[unit - 1].run(in);
              });
            }
            return h * net.head;
          });
        })).backward();
        root.unshard(kUnit);
        root.await_unit(kUnit);
        EXPECT_EQ(net.blocks[0].weight.const_data_ptr(), address);
        root.reshard(kUnit, /*writes=*/false);
      }
      const ShardingStatistics found = root.statistics();
      EXPECT_EQ(found.unplanned, 0);
      EXPECT_EQ(found.peak_whole_bytes, found.planned_bytes);
      root.settings(kUnit).keeps_storage = false;
      train_step(root, net, rank, 3);
      EXPECT_EQ(root.statistics().allocations, found.allocations);
    });
  }
}

}  // namespace unit_unshard_test
}  // namespace brigade
