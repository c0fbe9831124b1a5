// What gathers follow in backward: the forward that has just been, where all
// ranks have seen the same one, whatever the steps before were like.

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/noting_hook.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace recorded_order_test {

using testing::expect_gradients;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::Net;
using testing::Reference;
using testing::run_ranks;
using testing::sgd;
using testing::zero_what_no_rank_used;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr double kRate = 0.1;

// Each is another one than the step's before, and none is that of the units.
const std::vector<std::vector<size_t>> kOrders = {
    {3, 1, 0, 2}, {0, 2, 1, 3}, {1, 0, 3, 2}, {2, 3}, {0, 1, 0, 3}, {2, 0, 1}};

const std::vector<int64_t> kSizes = {4, 4, 4, 4, 4};

// Of gathers that came where they were needed only, and of those that were
// under way before.
struct Counts {
  explicit Counts(const ShardedRoot& root)
      : late(root.statistics().late_gathers),
        ahead(root.statistics().ahead_gathers) {}
  int64_t late;
  int64_t ahead;
};

class RecordedOrderTest : public ::testing::TestWithParam<int> {};

TEST_P(RecordedOrderTest, BackwardFollowsTheForwardBeforeIt) {
  run_ranks(GetParam(), [&](const Group& group) {
    const int rank = group->getRank();
    Net plain(kSizes);
    Net net(kSizes);
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    for (size_t step = 0; step < 2 * kOrders.size(); ++step) {
      const int batch = static_cast<int>(step);
      const auto& order = kOrders[step % kOrders.size()];
      reference.accumulate(GetParam(), [&](int r) {
        return loss_of(plain.run(plain.input(r, batch), order));
      });
      const at::Tensor loss = loss_of(root.forward(
          [&] { return net.run(root, net.input(rank, batch), order); }));
      const Counts before(root);
      loss.backward();
      const Counts after(root);
      EXPECT_EQ(after.late, before.late) << "step " << step;
      EXPECT_GT(after.ahead, before.ahead) << "step " << step;
      zero_what_no_rank_used(root);
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

TEST_P(RecordedOrderTest, SoDoesOneThatIsNotReduced) {
  run_ranks(GetParam(), [&](const Group& group) {
    const int rank = group->getRank();
    Net net(kSizes);
    ShardedRoot root(net.units(), group, {});
    for (size_t step = 0; step < kOrders.size(); ++step) {
      root.set_synchronizes(step % 2 == 1);
      const at::Tensor loss = loss_of(root.forward([&] {
        return net.run(root, net.input(rank, static_cast<int>(step)),
                       kOrders[step]);
      }));
      const Counts before(root);
      loss.backward();
      EXPECT_EQ(Counts(root).late, before.late) << "step " << step;
    }
  });
}

// Its backward may be of either.
TEST_P(RecordedOrderTest, TheLastOfTwoForwardsIsNotFollowed) {
  run_ranks(GetParam(), [&](const Group& group) {
    const int rank = group->getRank();
    Net net(kSizes);
    ShardedRoot root(net.units(), group, {});
    for (int step = 0; step < 3; ++step) {
      const auto loss_with = [&](const std::vector<size_t>& order) {
        return loss_of(root.forward(
            [&] { return net.run(root, net.input(rank, step), order); }));
      };
      const at::Tensor loss = loss_with({0, 1, 0, 1});
      if (step == 2) loss_with({0});
      const Counts before(root);
      loss.backward();
      EXPECT_EQ(Counts(root).late, before.late) << "step " << step;
    }
  });
}

// Ranks that differ keep to what they have agreed on last, and so gather late.
TEST_P(RecordedOrderTest, OneThatOnlySomeRanksHaveSeenIsNotFollowed) {
  run_ranks(GetParam(), [&](const Group& group) {
    const int rank = group->getRank();
    Net plain(kSizes);
    Net net(kSizes);
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    for (size_t step = 0; step < kOrders.size(); ++step) {
      const int batch = static_cast<int>(step);
      const auto order_of = [&](int r) {
        return kOrders[(step + (r == 0 ? 1 : 0)) % kOrders.size()];
      };
      reference.accumulate(GetParam(), [&](int r) {
        return loss_of(plain.run(plain.input(r, batch), order_of(r)));
      });
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, batch), order_of(rank));
      })).backward();
      zero_what_no_rank_used(root);
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
    EXPECT_EQ(root.engine_statistics().aborted, 0);
  });
}

// What ranks have used of each unit is no part of the order.
TEST_P(RecordedOrderTest, RanksThatUseOtherParametersAgreeOnTheOrder) {
  run_ranks(GetParam(), [&](const Group& group) {
    const int rank = group->getRank();
    Net net(kSizes);
    ShardedRoot root(net.units(), group, {});
    const std::vector<size_t> order = {2, 0, 3, 1};
    for (int step = 0; step < 4; ++step) {
      loss_of(root.forward([&] {
        return root.call(0, net.input(rank, step), [&](at::Tensor h) {
          for (const size_t i : order) {
            h = root.call(i + 1, h, [&](const at::Tensor& inner) {
              const auto& block = net.blocks[i];
              const at::Tensor y = torch::matmul(inner, block.weight);
              return (step + rank) % 2 == 0 ? y : y + block.bias;
            });
          }
          return h * net.head;
        });
      })).backward();
    }
    EXPECT_THAT(root.explain(),
                HasSubstr("the next forward gathers ['', 'blocks.2', "
                          "'blocks.0', 'blocks.3', 'blocks.1']"));
  });
}

// Two blocks in turns, as heads or as fronts. Else the sum of one would hold up
// all that come behind it in the other's steps.
TEST_P(RecordedOrderTest, SumsDoNotWaitForUnitsThatNoRankHasCalled) {
  const std::vector<std::vector<size_t>> of_heads = {{0, 1, 2}, {0, 1, 3}};
  const std::vector<std::vector<size_t>> of_fronts = {{0, 2, 3}, {1, 2, 3}};
  for (const auto& orders : {of_heads, of_fronts}) {
    run_ranks(GetParam(), [&](const Group& group) {
      const int rank = group->getRank();
      size_t num_begun = 0;
      Net plain(kSizes);
      Net net(kSizes);
      Reference reference(plain);
      ShardedRoot root(net.units(), group,
                       {.comm_hook = std::make_shared<testing::NotingHook>(
                            [&] { ++num_begun; })});
      for (int step = 0; step < 6; ++step) {
        const std::vector<size_t>& order = orders[step % 2];
        reference.accumulate(GetParam(), [&](int r) {
          return loss_of(plain.run(plain.input(r, step), order));
        });
        at::Tensor input = net.input(rank, step).requires_grad_();
        size_t num_begun_by_then = 0;
        input.register_hook(
            [&](const at::Tensor&) { num_begun_by_then = num_begun; });
        const at::Tensor loss =
            loss_of(root.forward([&] { return net.run(root, input, order); }));
        num_begun = 0;
        loss.backward();
        // Of the head and the blocks behind the first. Of the first step
        // nothing is known.
        if (step > 0) {
          EXPECT_GE(num_begun_by_then, 3U) << "step " << step;
        }
        EXPECT_EQ(num_begun, 5U);
        zero_what_no_rank_used(root);
        expect_gradients(root, reference.gradients, rank);
        reference.step(kRate);
        sgd(root.shards(), kRate);
      }
    });
  }
}

// Which no graph holds a call of.
TEST_P(RecordedOrderTest, WhatStaysWholeMayBeReadByTheLossAlone) {
  run_ranks(GetParam(), [&](const Group& group) {
    const int rank = group->getRank();
    Net plain(kSizes);
    Net net(kSizes);
    Reference reference(plain);
    std::vector<UnitSpec> units = net.units();
    units.back().reshards_after_forward = false;
    ShardedRoot root(units, group, {});
    const std::vector<size_t> order = {0, 1, 2};
    // Its gradient comes behind the others: of nodes that are ready, autograd
    // runs a new thread's, which have small numbers, last.
    const auto with_last = [](const Net& of, const at::Tensor& y) {
      at::Tensor last;
      std::thread([&] {
        last = of.blocks.back().weight.square().sum();
      }).join();
      return last + loss_of(y);
    };
    for (int step = 0; step < 3; ++step) {
      reference.accumulate(GetParam(), [&](int r) {
        return with_last(plain, plain.run(plain.input(r, step), order));
      });
      with_last(net, root.forward([&] {
        return net.run(root, net.input(rank, step), order);
      })).backward();
      zero_what_no_rank_used(root);
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, RecordedOrderTest,
                         ::testing::Values(2, 3));

}  // namespace recorded_order_test
}  // namespace brigade
