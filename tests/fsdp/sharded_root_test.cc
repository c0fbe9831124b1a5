#include "brigade/fsdp/sharded_root.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "brigade/comm/recording_group.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace sharded_root_test {

using ::testing::AllOf;
using ::testing::Each;
using testing::expect_shards;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::message_of;
using testing::Net;
using testing::part_of;
using testing::Reference;
using testing::run_ranks;
using testing::sgd;
using testing::train_step;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr double kRate = 0.1;

// World size x shards x reshards x depth.
class ShardedTrainingTest
    : public ::testing::TestWithParam<std::tuple<int, int, bool, int>> {
 protected:
  int world_size() const { return std::get<0>(GetParam()); }
  ShardingOptions options() const {
    return {.num_shards = std::get<1>(GetParam()),
            .reshards_after_forward = std::get<2>(GetParam()),
            .prefetch_depth = static_cast<size_t>(std::get<3>(GetParam()))};
  }
};

// Sums in rank order on one dimension: bit for bit, with two ranks in any mesh.
TEST_P(ShardedTrainingTest, EqualsOneProcess) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    const int num_shards = *options().num_shards;
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, options());
    for (int step = 0; step < 4; ++step) {
      reference.accumulate(world_size(), [&](int r) {
        return loss_of(plain.run(plain.input(r, step)));
      });
      train_step(root, net, rank, step);
      if (num_shards == world_size() || world_size() <= 2) {
        expect_shards(root, reference.gradients, rank % num_shards,
                      /*of_gradients=*/true);
      }
      reference.step(kRate);
      sgd(root.shards(), kRate);
      if (num_shards == world_size() || world_size() <= 2) {
        expect_shards(root, plain.parameters(), rank % num_shards,
                      /*of_gradients=*/false);
      }
    }
    EXPECT_EQ(root.statistics().late_gathers, 0);
    EXPECT_EQ(root.engine_statistics().reduced, 4);
  });
}

INSTANTIATE_TEST_SUITE_P(
    , ShardedTrainingTest,
    ::testing::Values(std::tuple(1, 1, true, 1), std::tuple(2, 2, true, 1),
                      std::tuple(2, 2, false, 1), std::tuple(2, 2, true, 0),
                      std::tuple(2, 2, true, 3), std::tuple(2, 1, true, 1),
                      std::tuple(3, 3, true, 1), std::tuple(4, 4, true, 2),
                      std::tuple(4, 2, true, 1), std::tuple(4, 1, false, 1)));

// Strategies give the same bits on a mesh of the same rows.
TEST(ShardedRootTest, DepthAndReshardingChangeNoBits) {
  for (const int num_shards : {1, 2, 4}) {
    std::vector<std::vector<at::Tensor>> runs;
    for (const auto& [reshards, depth] :
         {std::pair(true, 1), std::pair(false, 0), std::pair(true, 4)}) {
      std::vector<at::Tensor> found;
      run_ranks(4, [&, reshards = reshards, depth = depth](const Group& group) {
        Net net;
        ShardedRoot root(net.units(), group,
                         {.num_shards = num_shards,
                          .reshards_after_forward = reshards,
                          .prefetch_depth = static_cast<size_t>(depth)});
        for (int step = 0; step < 3; ++step) {
          train_step(root, net, group->getRank(), step);
          sgd(root.shards(), kRate);
        }
        root.unshard();
        if (group->getRank() == 0) {
          for (const at::Tensor& parameter : net.parameters()) {
            found.push_back(parameter.detach().clone());
          }
        }
        root.reshard(/*writes=*/false);
      });
      runs.push_back(found);
    }
    for (size_t run = 1; run < runs.size(); ++run) {
      for (size_t i = 0; i < runs[0].size(); ++i) {
        EXPECT_TRUE(at::equal(runs[0][i], runs[run][i]));
      }
    }
  }
}

TEST(ShardedRootTest, ParametersAreReadableOnlyWhileTheyAreWhole) {
  run_ranks(2, [&](const Group& group) {
    Net plain;
    Net net;
    ShardedRoot root(net.units(), group, {});
    EXPECT_THAT(
        message_of([&] { net.blocks[0].weight.sum(); }),
        HasSubstr("the parameters of unit 'blocks.0' are sharded here"));
    root.unshard();
    EXPECT_TRUE(at::equal(net.blocks[0].weight, plain.blocks[0].weight));
    {
      const torch::NoGradGuard no_grad;
      net.blocks[0].weight.fill_(2);
    }
    root.reshard(/*writes=*/true);
    EXPECT_THAT(message_of([&] { net.blocks[0].weight.sum(); }),
                HasSubstr("unshard()"));
    EXPECT_TRUE((root.shards_of(1)[0] == 2).all().item<bool>());
    root.unshard();
    EXPECT_TRUE((net.blocks[0].weight == 2).all().item<bool>());
    root.reshard(/*writes=*/false);
  });
}

// No copy stands between them: nobody waits for the gather.
TEST(ShardedRootTest, GathersWriteWhereParametersLie) {
  RecordingGroup recording(2);
  Net net;
  ShardedRoot root(net.units(), recording.group(), {});
  const Segment& segment = *root.unit(1).segments.front();
  const int64_t numel = segment.layout().shard_numel();
  recording.hold();
  root.unshard(1);
  const at::Tensor whole =
      at::from_blob(net.blocks[0].weight.storage().mutable_data(), {2 * numel});
  whole.narrow(0, numel, numel).zero_();
  recording.release();
  EXPECT_TRUE(at::equal(whole, at::cat({segment.shard(), segment.shard()})));
  root.reshard(1, /*writes=*/false);
}

TEST(ShardedRootTest, ParametersLieAsLaidOutAtOneAddressByPlan) {
  const RecordingGroup recording(2);
  Net net;
  ShardedRoot root(net.units(), recording.group(), {});
  std::vector<const void*> addresses(root.num_units());
  const auto expect_in_place = [&](size_t unit) {
    const Segment& segment = *root.unit(unit).segments.front();
    const auto& parameters = segment.parameters();
    const c10::Storage& whole = parameters.front().tensor.storage();
    EXPECT_EQ(static_cast<int64_t>(whole.nbytes()), segment.whole_bytes());
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(
          parameters[i].tensor.const_data_ptr<float>(),
          static_cast<const float*>(whole.data()) + segment.layout().offset(i));
    }
    if (addresses[unit] == nullptr) addresses[unit] = whole.data();
    EXPECT_EQ(whole.data(), addresses[unit]);
  };
  for (int step = 0; step < 3; ++step) {
    loss_of(root.forward([&] {
      return root.call(0, net.input(0, step), [&](at::Tensor h) {
        expect_in_place(0);
        for (size_t unit = 1; unit < root.num_units(); ++unit) {
          h = root.call(unit, h, [&](const at::Tensor& in) {
            expect_in_place(unit);
            return net.blocks[unit - 1].run(in);
          });
        }
        return h * net.head;
      });
    })).backward();
    sgd(root.shards(), kRate);
  }
  EXPECT_EQ(root.statistics().unplanned, 0);
}

TEST(ShardedRootTest, AllocatesNothingAfterTheSecondStep) {
  run_ranks(2, [&](const Group& group) {
    Net net({8, 8, 8, 8, 8, 8});
    ShardedRoot root(net.units(), group, {});
    int64_t allocations = 0;
    for (int step = 0; step < 6; ++step) {
      train_step(root, net, group->getRank(), step);
      sgd(root.shards(), kRate);
      if (step == 1) allocations = root.statistics().allocations;
    }
    EXPECT_EQ(root.statistics().allocations, allocations);
    EXPECT_GT(root.statistics().ahead_gathers, 0);
  });
}

// Ranks that use other parameters of a unit, and other units.
TEST(ShardedRootTest, BranchesMayDiffer) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const std::vector<std::vector<size_t>> orders = {{0, 1, 2}, {0, 1}, {2, 0}};
    Net plain({4, 4, 4, 4});
    Net net({4, 4, 4, 4});
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    for (int step = 0; step < 6; ++step) {
      const auto order_of = [&](int r) -> const std::vector<size_t>& {
        return orders[(step + r) % orders.size()];
      };
      reference.accumulate(2, [&](int r) {
        at::Tensor h = plain.input(r, step);
        for (const size_t i : order_of(r)) h = plain.blocks[i].run(h);
        return loss_of(h * plain.head);
      });
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, step), order_of(rank));
      })).backward();
      expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
      reference.step(kRate);
      sgd(root.shards(), kRate);
      expect_shards(root, plain.parameters(), rank, /*of_gradients=*/false);
    }
  });
}

TEST(ShardedRootTest, WhatNoRankUsesKeepsItsGradient) {
  run_ranks(3, [&](const Group& group) {
    const int rank = group->getRank();
    Net net({4, 4, 4, 4});
    ShardedRoot root(net.units(), group, {});
    const std::vector<size_t> order =
        rank == 0 ? std::vector<size_t>{0} : std::vector<size_t>{0, 1};
    for (int step = 0; step < 3; ++step) {
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, step), order);
      })).backward();
      for (const at::Tensor& shard : root.shards_of(2)) {
        EXPECT_TRUE(shard.grad().defined());
      }
      for (const at::Tensor& shard : root.shards_of(3)) {
        EXPECT_FALSE(shard.grad().defined());
      }
      sgd(root.shards(), kRate);
    }
  });
}

TEST(ShardedRootTest, AUnitMayBeCalledTwice) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain({4, 4, 4});
    Net net({4, 4, 4});
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    const std::vector<size_t> order = {0, 1, 0, 1, 1};
    int64_t late = 0;
    for (int step = 0; step < 4; ++step) {
      reference.accumulate(2, [&](int r) {
        at::Tensor h = plain.input(r, step);
        for (const size_t i : order) h = plain.blocks[i].run(h);
        return loss_of(h * plain.head);
      });
      loss_of(root.forward([&] {
        return net.run(root, net.input(rank, step), order);
      })).backward();
      expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
      sgd(root.shards(), kRate);
      reference.step(kRate);
      if (step == 0) late = root.statistics().late_gathers;
    }
    EXPECT_GT(late, 0);
    EXPECT_EQ(root.statistics().late_gathers, late) << "they were recorded";
  });
}

TEST(ShardedRootTest, ForwardsWithoutGradientsComeInBetween) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    Reference reference(plain);
    ShardedRoot root(net.units(), group, {});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor y =
          root.forward([&] { return net.run(root, net.input(rank, step)); });
      {
        const torch::NoGradGuard no_grad;
        const at::Tensor seen =
            root.forward([&] { return net.run(root, net.input(0, step)); });
        EXPECT_TRUE(at::equal(seen, plain.run(net.input(0, step))));
      }
      reference.accumulate(
          2, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
      loss_of(y).backward();
      expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
      sgd(root.shards(), kRate);
      reference.step(kRate);
    }
  });
}

TEST(ShardedRootTest, SeveralForwardsBeforeTheirBackwards) {
  for (const bool in_order : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      Net plain;
      Net net;
      ShardedRoot root(net.units(), group, {});
      Reference reference(plain);
      for (int step = 0; step < 3; ++step) {
        const auto forward = [&](int batch) {
          return root.forward([&] {
            return net.run(root, net.input(rank, 10 * step + batch));
          });
        };
        const at::Tensor first = loss_of(forward(0));
        const at::Tensor second = loss_of(forward(1));
        (in_order ? first : second).backward();
        (in_order ? second : first).backward();
        std::vector<at::Tensor> sums;
        for (const int batch :
             in_order ? std::vector{0, 1} : std::vector{1, 0}) {
          reference.accumulate(2, [&](int r) {
            return loss_of(plain.run(plain.input(r, 10 * step + batch)));
          });
          for (size_t i = 0; i < reference.gradients.size(); ++i) {
            if (sums.size() <= i) {
              sums.push_back(reference.gradients[i]);
            } else {
              sums[i] = sums[i] + reference.gradients[i];
            }
          }
        }
        expect_shards(root, sums, rank, /*of_gradients=*/true);
        for (const at::Tensor& shard : root.shards()) {
          shard.mutable_grad() = at::Tensor();
        }
      }
      EXPECT_EQ(root.engine_statistics().reduced, 6);
    });
  }
}

TEST(ShardedRootTest, AddsMicroBatchesUpBeforeTheyAreReduced) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net plain;
    Net net;
    ShardedRoot root(net.units(), group, {});
    Reference reference(plain);
    for (int step = 0; step < 2; ++step) {
      for (int batch = 0; batch < 3; ++batch) {
        root.set_synchronizes(batch == 2);
        train_step(root, net, rank, 10 * step + batch);
        if (batch < 2) {
          EXPECT_FALSE(root.shards()[0].grad().defined());
        }
      }
      reference.accumulate(2, [&](int r) {
        at::Tensor total;
        std::vector<at::Tensor> losses;
        for (int batch = 0; batch < 2; ++batch) {
          loss_of(plain.run(plain.input(r, 10 * step + batch))).backward();
        }
        return loss_of(plain.run(plain.input(r, 10 * step + 2)));
      });
      expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
      sgd(root.shards(), kRate);
      reference.step(kRate);
    }
    EXPECT_EQ(root.engine_statistics().reduced, 2);
  });
}

TEST(ShardedRootTest, FrozenParametersAreGatheredAndNotReduced) {
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    const auto frozen_net = [] {
      Net net;
      net.blocks[1].weight.requires_grad_(false);
      net.blocks[2].weight.requires_grad_(false);
      net.blocks[2].bias.requires_grad_(false);
      return net;
    };
    Net plain = frozen_net();
    Net net = frozen_net();
    ShardedRoot root(net.units(), group, {});
    for (int step = 0; step < 3; ++step) {
      train_step(root, net, rank, step);
      std::vector<at::Tensor> sums;
      for (int r = 0; r < 2; ++r) {
        loss_of(plain.run(plain.input(r, step))).backward();
      }
      size_t index = 0;
      const auto parameters = plain.parameters();
      for (size_t unit = 0; unit < root.num_units(); ++unit) {
        for (const at::Tensor& shard : root.shards_of(unit)) {
          EXPECT_EQ(shard.grad().defined(), parameters[index].grad().defined());
          parameters[index++].mutable_grad() = at::Tensor();
        }
      }
      for (const at::Tensor& shard : root.shards()) {
        shard.mutable_grad() = at::Tensor();
      }
    }
    EXPECT_EQ(root.statistics().late_gathers, 0);
  });
}

TEST(ShardedRootTest, ClipsTheNormOverAllRanks) {
  for (const double p :
       {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (const int num_shards : {1, 2, 4}) {
      std::array<double, 4> by_rank = {};
      run_ranks(4, [&](const Group& group) {
        Net plain;
        Net net;
        ShardedRoot root(net.units(), group, {.num_shards = num_shards});
        Reference reference(plain);
        reference.accumulate(
            4, [&](int r) { return loss_of(plain.run(plain.input(r, 0))); });
        train_step(root, net, group->getRank(), 0);
        std::vector<at::Tensor> flat;
        for (const at::Tensor& gradient : reference.gradients) {
          flat.push_back(gradient.flatten().to(torch::kDouble));
        }
        const double expected =
            at::linalg_vector_norm(torch::cat(flat), p).item<double>();
        const double norm = root.clip_grad_norm(0.5 * expected, p);
        EXPECT_NEAR(norm, expected, 1e-5 * expected);
        const double clipped = root.clip_grad_norm(1e9, p);
        EXPECT_NEAR(clipped, 0.5 * expected, 1e-5 * expected);
        by_rank[group->getRank()] = norm;
      });
      EXPECT_THAT(by_rank, ::testing::Each(by_rank.front()));
    }
  }
}

// Blocks have 42, 24, 24 and 28 elements, the head 1.
TEST(ShardedRootTest, ExplainsAndCountsWhatEachRankHolds) {
  struct Expected {
    int num_ranks;
    int64_t numel, padding;  // here; of whole units
    std::vector<std::string> lines;
  };
  const std::vector<Expected> cases = {
      {2,
       1 + 21 + 12 + 12 + 14,
       1,
       {"'': 1 parameters, 8 bytes whole, 4 bytes here, 1 elements of padding",
        "'blocks.0': 2 parameters, 168 bytes whole, 84 bytes here, 0 elements "
        "of padding",
        "'blocks.3': 2 parameters, 112 bytes whole, 56 bytes here"}},
      {4,
       1 + 11 + 6 + 6 + 7,
       3 + 2,
       {"'': 1 parameters, 16 bytes whole, 4 bytes here, 3 elements of padding",
        "'blocks.0': 2 parameters, 176 bytes whole, 44 bytes here, 2 elements "
        "of padding"}}};
  for (const Expected& expected : cases) {
    run_ranks(expected.num_ranks, [&](const Group& group) {
      Net net;
      const ShardedRoot root(net.units(), group, {});
      EXPECT_EQ(root.statistics().shard_bytes, 4 * expected.numel);
      EXPECT_EQ(root.statistics().padding_bytes, 4 * expected.padding);
      for (const std::string& line : expected.lines) {
        EXPECT_THAT(root.explain(), HasSubstr(line));
      }
    });
  }
}

TEST(ShardedRootTest, TellsItsScheduleBeforeItRuns) {
  run_ranks(2, [](const Group& group) {
    const Net net;
    const ShardedRoot root(net.units(), group, {.prefetch_depth = 2});
    const std::string text = root.explain();
    EXPECT_THAT(text,
                HasSubstr("the next forward gathers ['', 'blocks.0', "
                          "'blocks.1', 'blocks.2', 'blocks.3'] in this order, "
                          "2 ahead of their need"));
    EXPECT_THAT(text,
                HasSubstr("its backward needs ['', 'blocks.3', "
                          "'blocks.2', 'blocks.1', 'blocks.0'] and reduces "
                          "['blocks.3', 'blocks.2', 'blocks.1', "
                          "'blocks.0', '']"));
    // Three of them are whole at once, and three's memory goes round.
    EXPECT_THAT(text, HasSubstr(", buffer 0 in forward"));
  });
}

TEST(ShardedRootTest, ANormIsOneAllReduceOfANumberForEachRank) {
  for (const double p :
       {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    const RecordingGroup recording(4);
    Net net;
    ShardedRoot root(net.units(), recording.group(), {});
    train_step(root, net, /*rank=*/0, /*step=*/0);
    const size_t before = recording.log().size();
    root.clip_grad_norm(1, p);
    const std::vector<RecordedCollective> log = recording.log();
    ASSERT_EQ(log.size(), before + 1);
    EXPECT_EQ(log.back().type, c10d::OpType::ALLREDUCE);
    EXPECT_EQ(log.back().numel, 4);
  }
}

// As torch's clip_grad_norm_: what is no number is not hidden by a maximum.
TEST(ShardedRootTest, NormsOfWhatIsNoNumberAreNone) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double p : {1.0, 2.0, kInfinity}) {
    for (const double bad : {std::nan(""), kInfinity}) {
      run_ranks(2, [&](const Group& group) {
        Net net;
        ShardedRoot root(net.units(), group, {});
        train_step(root, net, group->getRank(), 0);
        if (group->getRank() == 1) {
          root.shards_of(1)[0].mutable_grad().fill_(bad);
        }
        const double norm = root.clip_grad_norm(1, p);
        EXPECT_EQ(std::isnan(norm), std::isnan(bad)) << p;
        EXPECT_FALSE(std::isfinite(norm)) << p;
        if (std::isnan(bad)) {
          EXPECT_TRUE(root.shards_of(2)[0].grad().isnan().all().item<bool>());
        }
      });
    }
  }
}

TEST(ShardedRootTest, ComputesInLowPrecisionAndKeepsMastersInTheirOwn) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {.param_dtype = torch::kBFloat16});
    EXPECT_EQ(net.blocks[0].weight.scalar_type(), torch::kBFloat16);
    for (int step = 0; step < 2; ++step) {
      const at::Tensor y = root.forward([&] {
        return net.run(root,
                       net.input(group->getRank(), step).to(torch::kBFloat16));
      });
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
      loss_of(y.to(torch::kFloat)).backward();
      for (const at::Tensor& shard : root.shards()) {
        EXPECT_EQ(shard.scalar_type(), torch::kFloat);
        EXPECT_EQ(shard.grad().scalar_type(), torch::kFloat);
      }
      sgd(root.shards(), kRate);
    }
  });
}

// More reductions than keep memory wait for a peer that waits for a gather.
TEST(ShardedRootTest, BranchesMayShareNothing) {
  for (const bool reshards : {true, false}) {
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      const std::vector<std::vector<size_t>> orders = {{1, 2, 3, 4, 5, 6}, {0}};
      Net plain({4, 4, 4, 4, 4, 4, 4, 4});
      Net net({4, 4, 4, 4, 4, 4, 4, 4});
      Reference reference(plain);
      ShardedRoot root(net.units(), group,
                       {.reshards_after_forward = reshards});
      for (int step = 0; step < 3; ++step) {
        reference.accumulate(2, [&](int r) {
          at::Tensor h = plain.input(r, step);
          for (const size_t i : orders[r]) h = plain.blocks[i].run(h);
          return loss_of(h * plain.head);
        });
        loss_of(root.forward([&] {
          return net.run(root, net.input(rank, step), orders[rank]);
        })).backward();
        expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
        reference.step(kRate);
        sgd(root.shards(), kRate);
      }
    });
  }
}

// The gradient of what is trained comes before what is frozen has been read.
TEST(ShardedRootTest, AUnitWithoutInputsThatNeedGradientsStaysWholeInBackward) {
  run_ranks(2, [&](const Group& group) {
    at::Tensor gain = torch::full({1}, 0.5).requires_grad_();
    at::Tensor frozen = torch::eye(4);
    at::Tensor inner = torch::full({4}, 2.0).requires_grad_();
    ShardedRoot root(
        std::vector<UnitSpec>{
            {.name = "outer",
             .parameters = {{"gain", gain}, {"frozen", frozen}}},
            {.name = "inner", .parameters = {{"inner", inner}}}},
        group, {});
    root.forward([&] {
          return root.call(0, torch::ones({4}), [&](at::Tensor x) {
            x = root.call(1, x,
                          [&](const at::Tensor& in) { return in * inner; });
            return torch::matmul(frozen, x) * gain.exp();
          });
        })
        .sum()
        .backward();
    EXPECT_TRUE(root.shards_of(1)[0].grad().defined());
  });
}

TEST(ShardedRootTest, ParametersAreReadableBehindTheRootIfTheyWereWhole) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    at::Tensor loss;
    {
      ShardedRoot root(net.units(), group, {.reshards_after_forward = false});
      loss =
          loss_of(root.forward([&] { return net.run(root, net.input(0, 0)); }));
    }
    EXPECT_TRUE(at::equal(net.blocks[0].weight, Net().blocks[0].weight));
    EXPECT_NO_THROW(loss.backward()) << "nobody shards what it brings";
  });
}

TEST(ShardedRootTest, AGradientThatIsKeptStaysWhatItIs) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    train_step(root, net, group->getRank(), 0);
    const at::Tensor kept = root.shards()[1].grad().detach();
    const at::Tensor copy = kept.clone();
    for (int step = 1; step < 5; ++step) {
      for (const at::Tensor& shard : root.shards()) {
        shard.mutable_grad() = at::Tensor();
      }
      train_step(root, net, group->getRank(), step);
    }
    EXPECT_TRUE(at::equal(kept, copy));
  });
}

TEST(ShardedRootTest, AForwardInsideOfUnshardSeesWhatShardsHold) {
  run_ranks(2, [&](const Group& group) {
    const torch::NoGradGuard no_grad;
    Net net;
    ShardedRoot root(net.units(), group, {});
    root.unshard();
    for (at::Tensor& shard : root.shards()) shard.fill_(0);
    const at::Tensor y =
        root.forward([&] { return net.run(root, net.input(0, 0)); });
    EXPECT_TRUE((y == 0).all().item<bool>());
    root.reshard(/*writes=*/false);
  });
}

TEST(ShardedRootTest, WritingLowPrecisionBackKeepsTheMastersDigits) {
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {.param_dtype = torch::kBFloat16});
    const at::Tensor before = root.shards_of(1)[0].detach().clone();
    root.unshard();
    root.reshard(/*writes=*/true);
    EXPECT_TRUE(at::equal(root.shards_of(1)[0], before));
  });
}

// ---- Failures.

// What ranks are told.
void expect_alike(const std::vector<std::string>& texts,
                  const ::testing::Matcher<std::string>& words) {
  EXPECT_THAT(texts, Each(AllOf(words, texts.front())));
}

TEST(ShardedRootFailureTest, ParametersThatChangeBeforeBackward) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    const at::Tensor loss =
        loss_of(root.forward([&] { return net.run(root, net.input(0, 0)); }));
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& shard : root.shards()) shard.add_(1);
    }
    texts[group->getRank()] = message_of([&] { loss.backward(); });
    train_step(root, net, group->getRank(), 1);
    EXPECT_TRUE(root.shards()[0].grad().defined());
  });
  expect_alike(texts, HasSubstr("the parameters of unit '' were changed "
                                "between its forward and its backward"));
}

TEST(ShardedRootFailureTest, ShardsThatAreNoShardsAnyMore) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    Net net;
    ShardedRoot root(net.units(), group, {});
    root.shards_of(2)[0].set_data(torch::zeros(root.shards_of(2)[0].sizes()));
    texts[group->getRank()] =
        message_of([&] { train_step(root, net, group->getRank(), 0); });
  });
  expect_alike(texts, HasSubstr("was given other memory"));
}

TEST(ShardedRootFailureTest, AForwardThatThrowsOnOneRank) {
  for (const size_t place : {0, 1, 3}) {
    std::vector<std::string> texts(3);
    run_ranks(3, [&](const Group& group) {
      const int rank = group->getRank();
      Net plain;
      Net net;
      ShardedRoot root(net.units(), group, {});
      Reference reference(plain);
      for (int step = 0; step < 4; ++step) {
        const bool fails = step == 1;
        const std::string message = message_of([&] {
          loss_of(root.forward([&] {
            at::Tensor h = net.input(rank, step);
            return root.call(0, h, [&](at::Tensor in) {
              for (size_t i = 0; i < net.blocks.size(); ++i) {
                in = root.call(i + 1, in, [&](const at::Tensor& inner) {
                  if (fails && rank == 1 && i == place) {
                    throw std::runtime_error("bad input");
                  }
                  return net.blocks[i].run(inner);
                });
              }
              return in * net.head;
            });
          })).backward();
        });
        if (fails) {
          texts[rank] = message;
          EXPECT_THAT(message, HasSubstr("bad input"));
          EXPECT_TRUE(root.can_continue());
          for (const at::Tensor& shard : root.shards()) {
            EXPECT_FALSE(shard.grad().defined());
          }
          continue;
        }
        EXPECT_EQ(message, "");
        reference.accumulate(
            3, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
        expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
        sgd(root.shards(), kRate);
        reference.step(kRate);
      }
    });
    EXPECT_EQ(texts[0], texts[2]);
  }
}

struct ThrowInBackward : public torch::autograd::Function<ThrowInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            at::Tensor x, bool throws) {
    context->saved_data["throws"] = throws;
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    if (context->saved_data["throws"].toBool()) {
      throw std::runtime_error("bad gradient");
    }
    return {gradients[0], at::Tensor()};
  }
};

TEST(ShardedRootFailureTest, ABackwardThatThrowsOnOneRank) {
  for (const size_t place : {0, 1, 3}) {
    std::vector<std::string> texts(3);
    run_ranks(3, [&](const Group& group) {
      const int rank = group->getRank();
      Net plain;
      Net net;
      ShardedRoot root(net.units(), group, {});
      Reference reference(plain);
      for (int step = 0; step < 4; ++step) {
        const bool fails = step == 1;
        const std::string message = message_of([&] {
          loss_of(root.forward([&] {
            at::Tensor h = net.input(rank, step);
            for (size_t i = 0; i < net.blocks.size(); ++i) {
              h = root.call(i + 1, h, [&](const at::Tensor& inner) {
                return net.blocks[i].run(inner);
              });
              if (i == place) {
                h = ThrowInBackward::apply(h, fails && rank == 1);
              }
            }
            return root.call(
                0, h, [&](const at::Tensor& in) { return in * net.head; });
          })).backward();
        });
        if (fails) {
          texts[rank] = message;
          EXPECT_THAT(message,
                      HasSubstr(rank == 1 ? "bad gradient"
                                          : "rank 1 failed in iteration 2"));
          EXPECT_TRUE(root.can_continue());
          for (const at::Tensor& shard : root.shards()) {
            EXPECT_FALSE(shard.grad().defined());
          }
          continue;
        }
        EXPECT_EQ(message, "");
        reference.accumulate(
            3, [&](int r) { return loss_of(plain.run(plain.input(r, step))); });
        expect_shards(root, reference.gradients, rank, /*of_gradients=*/true);
        sgd(root.shards(), kRate);
        reference.step(kRate);
      }
    });
    EXPECT_EQ(texts[0], texts[2]);
  }
}

TEST(ShardedRootFailureTest, ForwardsThatDifferInNumber) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    const int rank = group->getRank();
    Net net;
    ShardedRoot root(net.units(), group, {});
    train_step(root, net, rank, 0);
    texts[rank] = message_of([&] {
      const at::Tensor y =
          root.forward([&] { return net.run(root, net.input(rank, 1)); });
      if (rank == 0) {
        const torch::NoGradGuard no_grad;
        root.forward([&] { return net.run(root, net.input(rank, 1)); });
      }
      loss_of(y).backward();
    });
    for (const at::Tensor& shard : root.shards()) {
      shard.mutable_grad() = at::Tensor();
    }
    train_step(root, net, rank, 2);
    EXPECT_TRUE(root.shards()[0].grad().defined());
  });
  expect_alike(texts, AllOf(HasSubstr("began a forward"),
                            HasSubstr("began iteration 2")));
}

TEST(ShardedRootFailureTest, UnitsThatDifferAreToldAtConstruction) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    Net net(group->getRank() == 0 ? std::vector<int64_t>{4, 4}
                                  : std::vector<int64_t>{4, 5});
    texts[group->getRank()] =
        message_of([&] { ShardedRoot(net.units(), group, {}); });
    EXPECT_EQ(net.blocks[0].weight.sum().dim(), 0) << "it is untouched";
  });
  expect_alike(texts, HasSubstr("'blocks.0.weight'"));
}

TEST(ShardedRootFailureTest, AParameterInTwoUnits) {
  std::vector<std::string> texts(2);
  run_ranks(2, [&](const Group& group) {
    Net net;
    std::vector<UnitSpec> units = net.units();
    units[2].parameters.push_back({"tied", net.blocks[0].weight});
    texts[group->getRank()] =
        message_of([&] { ShardedRoot(units, group, {}); });
  });
  expect_alike(texts,
               HasSubstr("parameter 'tied' of unit 'blocks.1' shares its "
                         "memory with 'blocks.0.weight' of unit 'blocks.0'"));
}

}  // namespace sharded_root_test
}  // namespace brigade
