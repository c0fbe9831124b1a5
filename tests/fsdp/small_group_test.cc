// Units that stay in slices on a few neighbours from forward to backward: the
// bits are those of one process, and of units that are in shards in between;
// backward gathers among the neighbours.

#include <torch/torch.h>

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/recording_group.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/fsdp/units/reduction_hook.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace small_group_test {

using ::testing::Each;
using testing::expect_shards;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::loss_of;
using testing::message_of;
using testing::Net;
using ::testing::Not;
using testing::Reference;
using testing::run_ranks;
using testing::sgd;
using testing::train_step;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr double kRate = 0.1;
constexpr int64_t kNumBlocks = 4;  // each is gathered in backward, and no other

int64_t num_near(const ShardedRoot& root) {
  return root.statistics().near_gathers;
}

at::Tensor forward_loss(ShardedRoot& root, const Net& net, int rank, int step) {
  return loss_of(
      root.forward([&] { return net.run(root, net.input(rank, step)); }));
}

// Ranks x neighbours x depth.
class SmallGroupTrainingTest
    : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(SmallGroupTrainingTest, EqualsOneProcess) {
  const auto& [world_size, neighbours, depth] = GetParam();
  run_ranks(world_size, [&, num_ranks = world_size, to = neighbours,
                         ahead = depth](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(
        net.units(), group,
        {.reshards_to = to, .prefetch_depth = static_cast<size_t>(ahead)});
    for (int step = 0; step < 4; ++step) {
      reference.accumulate(num_ranks, [&](int r) {
        return loss_of(plain.run(plain.input(r, step)));
      });
      train_step(root, net, rank, step);
      expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
      reference.step(kRate);
      sgd(root.shards(), kRate);
      expect_shards(root, plain.parameters(), rank, /*of_gradients=*/false);
      EXPECT_EQ(num_near(root), kNumBlocks * (step + 1));
    }
    EXPECT_EQ(root.statistics().late_gathers, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(, SmallGroupTrainingTest,
                         ::testing::Values(std::tuple(4, 2, 0),
                                           std::tuple(4, 2, 1),
                                           std::tuple(4, 2, 3),
                                           std::tuple(6, 2, 1),
                                           std::tuple(6, 3, 1)));

// What a step does with either root, before its optimizer's step.
using Program = std::function<void(ShardedRoot&, const Net&, int, int)>;

// Two neighbours of four; returns their gathers of four steps.
int64_t expect_bits_of_shards(ShardingOptions options, const Program& program,
                              int world_size = 4) {
  int64_t found = 0;
  run_ranks(world_size, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    Net other;
    ShardingOptions in_slices = options;
    in_slices.reshards_to = 2;
    ShardedRoot root(net.units(), group, in_slices);
    ShardedRoot expected(other.units(), group, options);
    for (int step = 0; step < 4; ++step) {
      program(expected, other, rank, step);
      program(root, net, rank, step);
      for (size_t i = 0; i < root.shards().size(); ++i) {
        const at::Tensor gradient = root.shards()[i].grad();
        const at::Tensor wanted = expected.shards()[i].grad();
        ASSERT_EQ(gradient.defined(), wanted.defined()) << i;
        if (!wanted.defined()) continue;
        EXPECT_TRUE(at::equal(gradient, wanted)) << i;
      }
      sgd(root.shards(), kRate);
      sgd(expected.shards(), kRate);
    }
    EXPECT_EQ(num_near(expected), 0);
    if (rank == 0) found = num_near(root);
  });
  return found;
}

TEST(SmallGroupTest, OfAMeshEachRowIsSplit) {
  EXPECT_EQ(expect_bits_of_shards({.num_shards = 4}, train_step, 8),
            4 * kNumBlocks);
}

TEST(SmallGroupTest, InLowPrecision) {
  EXPECT_EQ(expect_bits_of_shards(
                {.param_dtype = at::kBFloat16},
                [](ShardedRoot& root, const Net& net, int rank, int step) {
                  loss_of(root.forward([&] {
                    return net.run(root,
                                   net.input(rank, step).to(at::kBFloat16));
                  })).backward();
                }),
            4 * kNumBlocks);
}

TEST(SmallGroupTest, GradientsTravelInLowPrecision) {
  EXPECT_EQ(expect_bits_of_shards(
                {.comm_hook = compression_hook(at::kBFloat16)}, train_step),
            4 * kNumBlocks);
}

// In every other step the first block is in front of all that is trained, so
// that no backward comes to it.
TEST(SmallGroupTest, FrozenUnitsAreGatheredWhereBackwardReachesThem) {
  EXPECT_EQ(expect_bits_of_shards(
                {},
                [](ShardedRoot& root, const Net& net, int rank, int step) {
                  for (const size_t unit : {1, 3}) {
                    for (at::Tensor shard : root.shards_of(unit)) {
                      shard.set_requires_grad(step % 2 == 1);
                    }
                  }
                  train_step(root, net, rank, step);
                }),
            4 * kNumBlocks - 2);
}

// Also where ranks share no block, and where one has no data at all.
TEST(SmallGroupTest, BranchesMayDiffer) {
  EXPECT_EQ(expect_bits_of_shards(
                {.prefetch_depth = 2},
                [](ShardedRoot& root, const Net& net, int rank, int step) {
                  if (rank == 3 && step == 2) return root.step_without_data();
                  const at::Tensor x = testing::random({3, 4}, 7 + rank);
                  loss_of(root.forward([&] {
                    return root.call(0, x, [&](at::Tensor h) {
                      for (size_t i = 0; i < 4; ++i) {
                        if ((i + step + rank) % 2 == 0) continue;
                        h = root.call(i + 1, h, [&](const at::Tensor& in) {
                          const at::Tensor& bias = net.blocks[i].bias;
                          return in * bias.sum() +
                                 net.blocks[i].weight.sum().tanh();
                        });
                      }
                      return h * net.head;
                    });
                  })).backward();
                }),
            4 * kNumBlocks);
}

// What forward has kept is there behind an evaluation, which keeps nothing.
TEST(SmallGroupTest, EvaluatesInBetween) {
  const auto evaluate = [](ShardedRoot& root, const Net& net, int rank) {
    const torch::NoGradGuard no_grad;
    forward_loss(root, net, rank, 20);
  };
  EXPECT_EQ(expect_bits_of_shards(
                {},
                [&](ShardedRoot& root, const Net& net, int rank, int step) {
                  const at::Tensor loss = forward_loss(root, net, rank, step);
                  evaluate(root, net, rank);
                  loss.backward();
                  evaluate(root, net, rank);
                }),
            4 * kNumBlocks);
}

// Slices of parameters that have changed since are not gathered.
TEST(SmallGroupTest, AForwardWhoseBackwardNeverComes) {
  EXPECT_EQ(expect_bits_of_shards(
                {},
                [](ShardedRoot& root, const Net& net, int rank, int step) {
                  forward_loss(root, net, rank, step + 10);
                  {
                    const torch::NoGradGuard no_grad;
                    for (at::Tensor shard : root.shards()) shard.mul_(0.75);
                  }
                  if (step % 2 == 1) {
                    root.unshard();
                    root.reshard(/*writes=*/true);
                  }
                  train_step(root, net, rank, step);
                }),
            4 * kNumBlocks);
}

// No new ones take their place.
TEST(SmallGroupTest, OldSlicesAreNotReadWhereNoneAreKeptAnyMore) {
  EXPECT_EQ(expect_bits_of_shards(
                {},
                [](ShardedRoot& root, const Net& net, int rank, int step) {
                  if (step == 0) {
                    forward_loss(root, net, rank, step + 10);
                    const torch::NoGradGuard no_grad;
                    for (at::Tensor shard : root.shards()) shard.mul_(0.75);
                    for (size_t unit = 0; unit < root.num_units(); ++unit) {
                      root.settings(unit).reshards_to = std::nullopt;
                    }
                  }
                  train_step(root, net, rank, step);
                }),
            0);
}

TEST(SmallGroupTest, GathersAreLaunchedAheadAsListed) {
  EXPECT_EQ(expect_bits_of_shards(
                {.prefetch_depth = 0},
                [](ShardedRoot& root, const Net& net, int rank, int step) {
                  root.settings(4).backward_prefetch = {3, 2};
                  root.settings(1).forward_prefetch = {3};
                  root.settings(2).reshards_after_forward = step % 2 == 0;
                  root.settings(3).reshards_after_backward = step % 2 == 1;
                  train_step(root, net, rank, step);
                  train_step(root, net, rank, step + 10);
                }),
            2 * (2 * kNumBlocks) + 2 * (2 * (kNumBlocks - 1)));
}

// The group of all ranks has forward's gathers and the sums, as a group counts
// them that answers by itself.
TEST(SmallGroupTest, BackwardGathersAmongNeighboursAlone) {
  const RecordingGroup recording(6);
  Net net;
  ShardedRoot root(net.units(), recording.group(), {.reshards_to = 3});
  const size_t at_construction = recording.log().size();
  forward_loss(root, net, 0, 0).backward();
  EXPECT_EQ(recording.log().size() - at_construction,
            static_cast<size_t>(2 * (kNumBlocks + 1)));
  EXPECT_EQ(num_near(root), kNumBlocks);
}

// ---- Errors.

TEST(SmallGroupFailureTest, NumbersThatNoUnitHadBefore) {
  std::vector<std::string> texts(6);
  run_ranks(6, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {.reshards_to = 2});
    root.settings(3).reshards_to = 3;
    texts[rank] = message_of([&] { train_step(root, net, rank, 0); });
    root.settings(3).reshards_to = std::nullopt;
    train_step(root, net, rank, 0);
    EXPECT_EQ(num_near(root), kNumBlocks - 1);
  });
  EXPECT_THAT(texts, Each(HasSubstr("found groups of [2] only")));
}

TEST(SmallGroupFailureTest, RanksThatKeepDifferentlyRaiseTheSame) {
  std::vector<std::string> texts(4);
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {.reshards_to = 2});
    if (rank == 1) root.settings(2).reshards_to = std::nullopt;
    texts[rank] = message_of([&] { train_step(root, net, rank, 0); });
    root.settings(2).reshards_to = std::nullopt;
    train_step(root, net, rank, 1);
    EXPECT_EQ(num_near(root), kNumBlocks - 1);
  });
  EXPECT_THAT(texts, Each(Not(IsEmpty())));
  EXPECT_THAT(texts, Each(texts[0]));
}

struct Throws : torch::autograd::Function<Throws> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/,
                            const at::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* /*context*/,
      const torch::autograd::variable_list& /*gradients*/) {
    throw std::runtime_error("bad gradient");
  }
};

// At any block, in either direction: shards stay as they are, no slice of it
// is left on some ranks only, and training goes on.
TEST(SmallGroupFailureTest, AnExceptionOnOneRank) {
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {.reshards_to = 2});
    for (int step = 0; step < 8; ++step) {
      const bool in_backward = step % 2 == 1;
      const auto place = static_cast<size_t>(step / 2);
      SCOPED_TRACE(absl::StrCat(in_backward ? "backward, " : "forward, ",
                                "block ", place));
      const auto run = [&](bool fails) {
        loss_of(root.forward([&] {
          return root.call(0, net.input(rank, step), [&](at::Tensor h) {
            for (size_t i = 0; i < 4; ++i) {
              const bool is_bad = fails && i == place;
              h = root.call(i + 1, h, [&](const at::Tensor& in) {
                if (is_bad && !in_backward) {
                  throw std::runtime_error("bad input");
                }
                return net.blocks[i].run(in);
              });
              if (is_bad && in_backward) h = Throws::apply(h);
            }
            return h * net.head;
          });
        })).backward();
      };
      const std::string text = message_of([&] { run(rank == 1); });
      EXPECT_THAT(text, HasSubstr(rank != 1     ? "rank 1 failed"
                                  : in_backward ? "bad gradient"
                                                : "bad input"));
      EXPECT_TRUE(root.can_continue());
      const int64_t before = num_near(root);
      reference.accumulate(
          4, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
      run(/*fails=*/false);
      EXPECT_EQ(num_near(root) - before, kNumBlocks);
      expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
      reference.step(kRate);
      sgd(root.shards(), kRate);
    }
  });
}

// A rank whose forward fails has kept slices of some units, its peers of all:
// none of them are gathered.
TEST(SmallGroupFailureTest, AnEarlierForwardHasItsBackwardBehindAFailure) {
  run_ranks(4, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {.reshards_to = 2});
    const at::Tensor loss = forward_loss(root, net, rank, 0);
    loss.backward(/*gradient=*/{}, /*retain_graph=*/true);
    EXPECT_EQ(num_near(root), kNumBlocks);
    EXPECT_ANY_THROW(
        loss_of(root.forward([&] {
          const at::Tensor y = net.run(root, net.input(rank, 1), {0, 1});
          TORCH_CHECK(rank != 1, "bad input");
          return y;
        })).backward());
    for (const at::Tensor& shard : root.shards()) shard.mutable_grad().reset();
    loss.backward();
    EXPECT_EQ(num_near(root), kNumBlocks);
    reference.accumulate(
        4, [&](int r) { return loss_of(plain.run(plain.input(r, 0))); });
    expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
  });
}

}  // namespace small_group_test
}  // namespace brigade
