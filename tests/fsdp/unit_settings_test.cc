// What a user sets of units between steps, and what ranks do beside backwards.

#include <torch/torch.h>

#include <string>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace unit_settings_test {

using testing::expect_gradients;
using testing::loss_of;
using testing::Net;
using testing::Reference;
using testing::run_ranks;
using testing::sgd;
using testing::train_step;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr double kRate = 0.1;

at::Tensor forward_loss(ShardedRoot& root, const Net& net, int rank, int step) {
  return loss_of(
      root.forward([&] { return net.run(root, net.input(rank, step)); }));
}

// Of small integers, whose sums have no order.
at::Tensor integer_loss(ShardedRoot& root, const at::Tensor& weight, int rank,
                        int batch) {
  return root.forward([&] {
    return root.call(0, torch::ones({1}), [&](const at::Tensor& in) {
      return (weight * in).sum() * (1 + rank + 10 * batch);
    });
  });
}

TEST(UnitSettingsTest, ARowThatFailsDropsWhatRowsHaveAddedUp) {
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    at::Tensor weight = torch::ones({7}).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{{.name = "", .parameters = {{"w", weight}}}},
        group, {.num_shards = 2});
    root.set_sums_over_replicas(false);
    integer_loss(root, weight, rank, 0).backward();
    root.set_sums_over_replicas(true);
    EXPECT_ANY_THROW(root.forward([&]() -> at::Tensor {
                           TORCH_CHECK(rank != 1, "rank 1 fails");
                           return root.call(0, torch::ones({1}),
                                            [&](const at::Tensor& in) {
                                              return (weight * in).sum();
                                            });
                         })
                         .backward());
    if (rank == 1) {  // its peers have met it where they began to reduce
      EXPECT_TRUE(root.can_continue());
    }
    integer_loss(root, weight, rank, 0).backward();
    EXPECT_TRUE((root.shards()[0].grad() == 2.5).all().item<bool>())
        << root.shards()[0].grad();
  });
}

TEST(UnitSettingsTest, RanksThatDivideDifferentlyRaiseTheSame) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {});
    if (rank == 1) root.settings(2).gradient_divisor = 3;
    try {
      train_step(root, net, rank, 0);
    } catch (const c10::Error& error) {
      texts[rank] = error.what_without_backtrace();
    }
    root.settings(2).gradient_divisor = 3;
    EXPECT_NO_THROW(train_step(root, net, rank, 1));
  });
  EXPECT_THAT(texts[0], Not(::testing::IsEmpty()));
  EXPECT_EQ(texts[0], texts[1]);
}

// A unit that is used on one rank only is whole on both.
TEST(UnitSettingsTest, UnitsOfDifferentBranchesMayStayWholeBehindBackward) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain({4, 4, 4});
    Net net({4, 4, 4});
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    for (size_t unit = 0; unit < root.num_units(); ++unit) {
      root.settings(unit).reshards_after_backward = false;
    }
    for (int step = 0; step < 4; ++step) {
      const auto order_of = [&](int r) {
        return (step + r) % 2 == 0 ? std::vector<size_t>{0}
                                   : std::vector<size_t>{1};
      };
      reference.accumulate(2, [&](int r) {
        at::Tensor h = plain.input(r, step);
        for (const size_t i : order_of(r)) h = plain.blocks[i].run(h);
        return loss_of(h * plain.head);
      });
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, step), order_of(rank));
      })).backward();
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

TEST(UnitSettingsTest, RanksThatFreezeDifferentlyRaiseTheSame) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {});
    if (rank == 1) root.shards_of(2)[0].set_requires_grad(false);
    try {
      train_step(root, net, rank, 0);
    } catch (const c10::Error& error) {
      texts[rank] = error.what_without_backtrace();
    }
    root.shards_of(2)[0].set_requires_grad(false);
    EXPECT_NO_THROW(train_step(root, net, rank, 1));
    EXPECT_FALSE(root.shards_of(2)[0].grad().defined());
    EXPECT_TRUE(root.shards_of(2)[1].grad().defined());
  });
  EXPECT_THAT(texts[0], Not(::testing::IsEmpty()));
  EXPECT_EQ(texts[0], texts[1]);
}

TEST(UnitSettingsTest, AllMayBeFrozen) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    for (const at::Tensor& shard : root.shards())
      shard.set_requires_grad(false);
    const at::Tensor loss = forward_loss(root, net, group->getRank(), 0);
    EXPECT_FALSE(loss.requires_grad());
    for (const at::Tensor& shard : root.shards()) shard.set_requires_grad(true);
    train_step(root, net, group->getRank(), 1);
    for (const at::Tensor& shard : root.shards()) {
      EXPECT_TRUE(shard.grad().defined());
    }
  });
}

// Several backwards without a step in between, of branches that differ, and a
// rank that runs out of data.
TEST(UnitSettingsTest, WhatStaysWholeBehindBackwardIsAlikeOnAllRanks) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net({4, 4, 4});
    ShardedRoot root(net.units(), group, {});
    root.shards_of(2)[0].set_requires_grad(false);
    root.shards_of(2)[1].set_requires_grad(false);
    for (size_t unit = 0; unit < root.num_units(); ++unit) {
      root.settings(unit).reshards_after_backward = false;
    }
    const std::vector<size_t> order =
        rank == 0 ? std::vector<size_t>{0, 1} : std::vector<size_t>{0};
    const auto step = [&](int index) {
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, index), order);
      })).backward();
    };
    step(0);
    step(1);
    sgd(root.shards(), kRate);
    step(2);
    root.unshard();
    root.reshard(/*writes=*/false);
    step(3);
    {
      const torch::NoGradGuard no_grad;
      root.forward([&] { return net.run(root, net.input(rank, 4), order); });
    }
    step(4);
    if (rank == 0) {
      step(5);
    } else {
      root.step_without_data();
    }
    step(6);
  });
}

TEST(UnitSettingsTest, WhatWasAddedUpOfAFrozenParameterIsDropped) {
  for (const bool rows_add_up : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      at::Tensor first = torch::ones({3}).requires_grad_();
      at::Tensor second = torch::ones({3}).requires_grad_();
      ShardedRoot root(
          std::vector<UnitSpec>{
              {.name = "", .parameters = {{"a", first}, {"b", second}}}},
          group, {.num_shards = 1});
      const auto step = [&](double factor) {
        root.forward([&] {
              return root.call(0, torch::ones({1}), [&](const at::Tensor& in) {
                return (first * second * in).sum() * factor;
              });
            })
            .backward();
      };
      const auto set_adding_up = [&](bool value) {
        root.set_synchronizes(rows_add_up || !value);
        root.set_sums_over_replicas(!value);
      };
      set_adding_up(true);
      step(1000);
      root.shards()[1].set_requires_grad(false);
      set_adding_up(false);
      step(1);
      EXPECT_TRUE((root.shards()[0].grad() == 1001).all().item<bool>());
      EXPECT_FALSE(root.shards()[1].grad().defined());
      root.shards()[1].set_requires_grad(true);
      root.shards()[0].mutable_grad() = at::Tensor();
      step(1);
      EXPECT_TRUE((root.shards()[1].grad() == 1).all().item<bool>())
          << root.shards()[1].grad();
    });
  }
}

// Returns another view of where it has written.
class Transposing : public torch::autograd::Function<Transposing> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& weight, ShardedRoot* root) {
    context->save_for_backward({weight});
    context->saved_data["root"] = reinterpret_cast<int64_t>(root);
    return weight.t().clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::variable_list& gradients) {
    auto* root =
        reinterpret_cast<ShardedRoot*>(context->saved_data["root"].toInt());
    at::Tensor slot = root->gradient_slot(context->get_saved_variables()[0]);
    if (!slot.defined()) return {gradients[0].t(), {}};
    slot.copy_(gradients[0]);
    return {slot.t(), {}};
  }
};

TEST(UnitSettingsTest, AnotherViewOfTheSlotIsTransposedAsItSays) {
  run_ranks(1, [&](const Group& group) {
    at::Tensor weight = torch::ones({3, 3}).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{{.name = "", .parameters = {{"w", weight}}}},
        group, {});
    const at::Tensor factors = torch::arange(9, torch::kFloat).view({3, 3});
    root.forward([&] {
          return root.call(0, torch::ones({1}), [&](const at::Tensor& in) {
            return (Transposing::apply(weight, &root) * factors * in).sum();
          });
        })
        .backward();
    EXPECT_TRUE(at::equal(root.shards()[0].grad(), factors.t()))
        << root.shards()[0].grad();
  });
}

TEST(UnitSettingsTest, WhatAForwardLeavesOutIsReleasedBehindIt) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net({4, 4, 4});
    ShardedRoot root(net.units(), group, {});
    int num_released = 0;
    root.unshard(1);
    root.await_unit(1, [&] { ++num_released; });
    root.forward([&] { return net.run(root, net.input(rank, 0), {1}); });
    EXPECT_EQ(num_released, 1);
    EXPECT_FALSE(root.await_unit(1));
    train_step(root, net, rank, 0);
    EXPECT_EQ(num_released, 1);
  });
}

}  // namespace unit_settings_test
}  // namespace brigade
