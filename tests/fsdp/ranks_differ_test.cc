// Programs whose ranks do different things: they get the bits of one process,
// or the same error on all ranks, behind which training goes on.

#include <torch/torch.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/checkpoint_model.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ranks_differ_test {

using ::testing::AllOf;
using ::testing::Each;
using testing::expect_gradients;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::message_of;
using testing::Net;
using testing::Reference;
using testing::run_ranks;
using testing::sgd;
using testing::train_step;
using testing::zero_what_no_rank_used;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr double kRate = 0.1;

// What the blocks of a forward give, and then the head.
using Outputs = std::vector<at::Tensor>;

Outputs outputs_of(const Net& net, at::Tensor h) {
  Outputs outputs;
  for (const auto& block : net.blocks) outputs.push_back(h = block.run(h));
  outputs.push_back(h * net.head);
  return outputs;
}

Outputs outputs_of(ShardedRoot& root, const Net& net, const at::Tensor& x) {
  return root.forward([&] {
    return root.call(0, x, [&](at::Tensor h) {
      Outputs outputs;
      for (size_t i = 0; i < net.blocks.size(); ++i) {
        h = root.call(i + 1, h, [&](const at::Tensor& inner) {
          return net.blocks[i].run(inner);
        });
        outputs.push_back(h);
      }
      outputs.push_back(h * net.head);
      return outputs;
    });
  });
}

at::Tensor loss_of(const Outputs& outputs, const std::vector<size_t>& chosen) {
  at::Tensor loss = torch::zeros({});
  for (const size_t i : chosen) loss = loss + testing::loss_of(outputs[i]);
  return loss;
}

std::vector<at::Tensor> sums_of(const std::vector<at::Tensor>& a,
                                const std::vector<at::Tensor>& b) {
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < a.size(); ++i) sums.push_back(a[i] + b[i]);
  return sums;
}

// Ranks x reshards.
class RanksDifferTest : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  ShardingOptions options() const {
    return {.reshards_after_forward = std::get<1>(GetParam())};
  }

  // A step that is alike on all ranks, `program`, and two such steps again.
  using Program = std::function<void(ShardedRoot&, const Net&, int rank)>;
  void expect_error(const Program& program,
                    const ::testing::Matcher<std::string>& words) const {
    std::vector<std::string> messages(world_size());
    run_ranks(world_size(), [&](const Group& group) {
      const int rank = group->getRank();
      Net plain;
      Net net;
      Reference reference(plain);
      ShardedRoot root(net.units(), group, options());
      for (int step = 0; step < 3; ++step) {
        if (step == 1) {
          messages[rank] = message_of([&] { program(root, net, rank); });
          ASSERT_TRUE(root.can_continue());
          for (const at::Tensor& shard : root.shards()) {
            EXPECT_FALSE(shard.grad().defined());
          }
        }
        train_step(root, net, rank, step);
        reference.accumulate(world_size(), [&](int r) {
          return testing::loss_of(plain.run(plain.input(r, step)));
        });
        expect_gradients(root, reference.gradients, rank);
        sgd(root.shards(), kRate);
        reference.step(kRate);
      }
    });
    EXPECT_THAT(messages, Each(words));
    EXPECT_THAT(messages, Each(messages[0]));
  }
};

INSTANTIATE_TEST_SUITE_P(, RanksDifferTest,
                         ::testing::Values(std::tuple(2, true),
                                           std::tuple(3, false)));

// ---- What gives the bits of one process.

TEST_P(RanksDifferTest, LossesOfOtherOutputs) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    const std::vector<std::vector<size_t>> losses = {{4}, {1, 4}, {0, 2}, {3}};
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, options());
    for (int step = 0; step < 5; ++step) {
      const auto chosen = [&](int r) { return losses[(step + r) % 4]; };
      reference.accumulate(world_size(), [&](int r) {
        return loss_of(outputs_of(plain, plain.input(r, step)), chosen(r));
      });
      loss_of(outputs_of(root, net, net.input(rank, step)), chosen(rank))
          .backward();
      zero_what_no_rank_used(root);
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

TEST_P(RanksDifferTest, AnInputThatTakesAGradientOnOneRank) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, options());
    for (int step = 0; step < 4; ++step) {
      const auto input_of = [&](int r) {
        return plain.input(r, step).requires_grad_((step + r) % 2 == 0);
      };
      at::Tensor expected;
      reference.accumulate(world_size(), [&](int r) {
        const at::Tensor input = input_of(r);
        if (r == rank) expected = input;
        return testing::loss_of(plain.run(input));
      });
      const at::Tensor input = input_of(rank);
      loss_of(outputs_of(root, net, input), {4}).backward();
      expect_gradients(root, reference.gradients, rank);
      ASSERT_EQ(input.grad().defined(), expected.grad().defined());
      if (input.grad().defined()) {
        EXPECT_TRUE(at::equal(input.grad(), expected.grad()));
      }
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

// Nothing but the last parameter tells that ranks have done different things.
TEST_P(RanksDifferTest, AParameterThatOneRankUses) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    at::Tensor weight = torch::full({6}, 2.0).requires_grad_();
    at::Tensor bias = torch::full({6}, 3.0).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{
            {.name = "", .parameters = {{"weight", weight}, {"bias", bias}}}},
        group, options());
    for (int step = 0; step < 3; ++step) {
      root.forward([&] {
            return root.call(0, torch::ones({6}), [&](const at::Tensor& x) {
              const at::Tensor h = x * weight;
              return rank == 0 ? h + bias : h;
            });
          })
          .sum()
          .backward();
      const at::Tensor& of_bias = root.shards()[1].grad();
      ASSERT_TRUE(of_bias.defined()) << "rank " << rank;
      EXPECT_TRUE(of_bias.equal(
          torch::full_like(of_bias, 1.0).mul(1.0 / world_size())));
      sgd(root.shards(), 0);
    }
  });
}

const std::vector<std::vector<size_t>> kOrders = {
    {0, 1, 2}, {2, 0, 2, 1}, {1, 1}, {}, {0, 2, 1, 0}, {2, 1, 0}};

TEST_P(RanksDifferTest, UnitsCalledInAnyOrderAndNumber) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    Net plain({4, 4, 4, 4});
    Net net({4, 4, 4, 4});
    Reference reference(plain);
    ShardedRoot root(net.units(), group, options());
    for (size_t step = 0; step < 2 * kOrders.size(); ++step) {
      const int batch = static_cast<int>(step);
      const auto order_of = [&](int r) {
        return kOrders[(step + r * (1 + step / kOrders.size())) %
                       kOrders.size()];
      };
      reference.accumulate(world_size(), [&](int r) {
        return testing::loss_of(plain.run(plain.input(r, batch), order_of(r)));
      });
      testing::loss_of(root.forward([&] {
        return net.run(root, net.input(rank, batch), order_of(rank));
      })).backward();
      zero_what_no_rank_used(root);
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
    EXPECT_GT(root.statistics().late_gathers, 0);
    EXPECT_EQ(root.engine_statistics().aborted, 0);
  });
}

TEST_P(RanksDifferTest, SeveralForwardsOfDifferentUnits) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    const std::vector<std::vector<size_t>> orders = {{0, 1}, {1, 2}, {2}, {0}};
    Net plain({4, 4, 4, 4});
    Net net({4, 4, 4, 4});
    Reference reference(plain);
    ShardedRoot root(net.units(), group, options());
    for (int step = 0; step < 6; ++step) {
      const auto order_of = [&](int r, int forward) {
        return orders[(step + r + 2 * forward + r * forward) % 4];
      };
      reference.accumulate(world_size(), [&](int r) {
        const at::Tensor x = plain.input(r, step);
        return testing::loss_of(plain.run(x, order_of(r, 0))) +
               testing::loss_of(plain.run(x, order_of(r, 1)));
      });
      std::vector<at::Tensor> losses;
      for (int forward = 0; forward < 2; ++forward) {
        losses.push_back(testing::loss_of(root.forward([&] {
          return net.run(root, net.input(rank, step), order_of(rank, forward));
        })));
      }
      (losses[0] + losses[1]).backward();
      zero_what_no_rank_used(root);
      expect_gradients(root, reference.gradients, rank);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
    EXPECT_EQ(root.engine_statistics().aborted, 0);
  });
}

// Ranks meet behind it, so that nobody makes a step before.
TEST_P(RanksDifferTest, ForwardsWithoutBackwardInAnyOrder) {
  run_ranks(world_size(), [&](const Group& group) {
    const torch::NoGradGuard no_grad;
    const int rank = group->getRank();
    Net plain({4, 4, 4, 4});
    Net net({4, 4, 4, 4});
    ShardedRoot root(net.units(), group, options());
    for (size_t step = 0; step < kOrders.size(); ++step) {
      const std::vector<size_t>& order =
          kOrders[(step + 2 * rank) % kOrders.size()];
      const at::Tensor x = net.input(rank, static_cast<int>(step));
      EXPECT_TRUE(
          at::equal(root.forward([&] { return net.run(root, x, order); }),
                    plain.run(x, order)));
    }
    EXPECT_EQ(root.num_ranks_with(true), world_size());
  });
}

// Each is reduced. Both go through one forward, or each through its own, of a
// half of the batch.
TEST_P(RanksDifferTest, TwoLossesWithABackwardEach) {
  for (const bool share_graph : {true, false}) {
    run_ranks(world_size(), [&](const Group& group) {
      const int rank = group->getRank();
      const std::vector<std::vector<size_t>> chosen = {{1}, {0, 4}};
      Net plain;
      Net net;
      Reference reference(plain);
      ShardedRoot root(net.units(), group, options());
      for (int step = 0; step < 4; ++step) {
        const auto input_of = [&](int r, int64_t loss) {
          const at::Tensor x = plain.input(r, step, /*rows=*/4);
          return share_graph ? x : x.narrow(0, 2 * loss, 2);
        };
        std::vector<at::Tensor> expected;
        std::vector<Outputs> outputs;
        for (const int64_t loss : {0, 1}) {
          reference.accumulate(world_size(), [&](int r) {
            return loss_of(outputs_of(plain, input_of(r, loss)), chosen[loss]);
          });
          expected = loss == 0 ? reference.gradients
                               : sums_of(expected, reference.gradients);
          outputs.push_back(share_graph && loss == 1
                                ? outputs[0]
                                : outputs_of(root, net, input_of(rank, loss)));
        }
        reference.gradients = expected;
        loss_of(outputs[0], chosen[0]).backward({}, /*retain_graph=*/true);
        loss_of(outputs[1], chosen[1]).backward();
        expect_gradients(root, expected, rank);
        reference.step(kRate);
        sgd(root.shards(), kRate);
      }
      EXPECT_EQ(root.engine_statistics().reduced, 8);
    });
  }
}

// Its last needs are answered where the others come to the checkpoint.
TEST_P(RanksDifferTest, ACheckpointWhileOneRankNeedsAUnitAgain) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) /
      absl::StrCat("needs_again_", getpid());
  std::filesystem::create_directories(folder);
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    Net net({4, 4, 4, 4});
    ShardedRoot root(net.units(), group, options());
    const auto need_again = [&] {
      const torch::NoGradGuard no_grad;
      const std::vector<size_t> once = {0, 1, 2};
      const std::vector<size_t> again = {0, 1, 2, 0, 1};
      root.forward([&] {
        return net.run(root, net.input(rank, 0), rank == 0 ? again : once);
      });
    };
    torch::optim::SGD optimizer(root.shards(), kRate);
    need_again();
    save_checkpoint(folder / "whole.safetensors", checkpoint_model(root),
                    optimizer);
    need_again();
    save_checkpoint(folder / "shards", checkpoint_model(root), optimizer);
    const at::Tensor saved = root.shards()[1].detach().clone();
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor shard : root.shards()) shard.zero_();
    }
    need_again();
    load_checkpoint(folder / "whole.safetensors", checkpoint_model(root),
                    optimizer);
    EXPECT_TRUE(at::equal(root.shards()[1].detach(), saved));
    need_again();
    load_checkpoint(folder / "shards", checkpoint_model(root), optimizer);
    EXPECT_TRUE(at::equal(root.shards()[1].detach(), saved));
  });
  std::filesystem::remove_all(folder);
}

// ---- What is an error on all ranks.

TEST_P(RanksDifferTest, ASecondForwardOfOneRank) {
  expect_error(
      [](ShardedRoot& root, const Net& net, int rank) {
        at::Tensor loss = loss_of(outputs_of(root, net, net.input(0, 9)), {4});
        if (rank == 1) {
          loss = loss + loss_of(outputs_of(root, net, net.input(1, 9)), {4});
        }
        loss.backward();
      },
      AllOf(HasSubstr("rank 1 began a forward after iteration 1"),
            HasSubstr("began iteration 2")));
}

TEST_P(RanksDifferTest, ABackwardThatOneRankSkips) {
  expect_error(
      [](ShardedRoot& root, const Net& net, int rank) {
        for (int step = 8; step < 10; ++step) {
          const Outputs outputs = outputs_of(root, net, net.input(rank, step));
          if (rank != 0) loss_of(outputs, {4}).backward();
        }
      },
      AllOf(HasSubstr("rank 0 began a forward after iteration 1"),
            HasSubstr("began iteration 2")));
}

TEST_P(RanksDifferTest, AnIterationThatOneRankAddsUpOnly) {
  expect_error(
      [](ShardedRoot& root, const Net& net, int rank) {
        const Outputs outputs = outputs_of(root, net, net.input(rank, 9));
        root.set_synchronizes(rank != 1);
        try {
          loss_of(outputs, {4}).backward();
        } catch (...) {
          root.set_synchronizes(true);
          throw;
        }
      },
      AllOf(HasSubstr("rank 1 began a backward that is not reduced"),
            HasSubstr("began iteration 2")));
}

// It would gather what the other rank has not computed with.
TEST_P(RanksDifferTest, AStepThatOneRankMakesWhileAnotherNeedsAUnitAgain) {
  expect_error(
      [](ShardedRoot& root, const Net& net, int rank) {
        const torch::NoGradGuard no_grad;
        for (int forward = 0; forward < 2; ++forward) {
          root.forward([&] {
            at::Tensor h = net.input(rank, 9);
            for (int call = 0; call < (rank == 0 ? 2 : 1); ++call) {
              h = root.call(1, h, [&](const at::Tensor& in) {
                return net.blocks[0].run(in);
              });
              h = h.narrow(1, 0, 5);
            }
            return h;
          });
          for (at::Tensor shard : root.shards()) shard.mul_(1);
        }
      },
      AllOf(HasSubstr("rank 0 needed unit 'blocks.0' again after iteration 1"),
            HasSubstr("began a forward after iteration 1")));
}

// ---- What ends training.

TEST_P(RanksDifferTest, ALoopThatOneRankEndsEarly) {
  std::vector<std::string> messages(world_size());
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    std::optional<ShardedRoot> root;
    root.emplace(net.units(), group, options());
    const int num_steps = rank == 1 ? 1 : 2;
    messages[rank] = message_of([&] {
      for (int step = 0; step < num_steps; ++step) {
        train_step(*root, net, rank, step);
      }
    });
    if (rank != 1) {
      EXPECT_FALSE(root->can_continue());
    }
    root.reset();
  });
  EXPECT_EQ(messages[1], "");
  messages.erase(messages.begin() + 1);
  EXPECT_THAT(messages, Each(HasSubstr("rank 1 has left")));
}

}  // namespace ranks_differ_test
}  // namespace brigade
