// Every way to shard gives the same bits on ranks in rows of one length: those
// of one process that adds up the ranks' gradients in the order of that mesh.
// The values are drawn, as sums of whole numbers would hide the order.

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/sharded_checks.h"
#include "brigade/tests/fsdp/sharded_net.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace strategy_bits_test {

using testing::add;
using testing::expect_shards;
using testing::loss_of;
using testing::Net;
using testing::run_ranks;
using testing::sgd;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Tensors = std::vector<at::Tensor>;

constexpr double kRate = 0.1;

// How the backwards of one step of the optimizer meet.
enum class Batches {
  kOne,
  kAddedUpHere,      // the last one's reduction has the sum of both
  kAddedUpInRows,    // replicas add up the sums of both
  kReducedEachTime,  // `.grad` has the sum of both averages
};
constexpr Batches kSteps[] = {Batches::kOne, Batches::kAddedUpHere,
                              Batches::kAddedUpInRows,
                              Batches::kReducedEachTime, Batches::kOne};

int num_batches(Batches batches) { return batches == Batches::kOne ? 1 : 2; }

at::Tensor input_of(const Net& net, int rank, size_t step, int batch) {
  return net.input(rank, static_cast<int>(2 * step) + batch);
}

Tensors gradients_of(const Net& net, const at::Tensor& input) {
  loss_of(net.run(input)).backward();
  Tensors gradients;
  for (const at::Tensor& parameter : net.parameters()) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

using ByRank = std::vector<Tensors>;

// Rows first, then their sums, of each batch; multiplied once.
Tensors average(const std::vector<ByRank>& batches, size_t row_length) {
  Tensors sums;
  const size_t world_size = batches.front().size();
  for (size_t row = 0; row < world_size; row += row_length) {
    Tensors of_row;
    for (const ByRank& by_rank : batches) {
      Tensors of_batch;
      for (size_t i = row; i < row + row_length; ++i) {
        add(of_batch, by_rank[i]);
      }
      add(of_row, of_batch);
    }
    add(sums, of_row);
  }
  for (at::Tensor& sum : sums) sum.mul_(1.0 / static_cast<double>(world_size));
  return sums;
}

// What several reductions bring.
Tensors average_of_each(const std::vector<ByRank>& batches, size_t row_length) {
  Tensors sums;
  for (const ByRank& by_rank : batches) {
    add(sums, average({by_rank}, row_length));
  }
  return sums;
}

ByRank added_up(const std::vector<ByRank>& batches) {
  ByRank sums(batches.front().size());
  for (const ByRank& by_rank : batches) {
    for (size_t rank = 0; rank < sums.size(); ++rank) {
      add(sums[rank], by_rank[rank]);
    }
  }
  return sums;
}

Tensors average_of(Batches batches, const std::vector<ByRank>& gradients,
                   size_t row_length) {
  const bool has_replicas = row_length < gradients.front().size();
  switch (batches) {
    case Batches::kOne:
    case Batches::kAddedUpHere:
      return average({added_up(gradients)}, row_length);
    case Batches::kAddedUpInRows:
      if (has_replicas) return average(gradients, row_length);
      break;
    case Batches::kReducedEachTime:
      break;
  }
  return average_of_each(gradients, row_length);
}

struct Trajectory {
  std::vector<Tensors> gradients;   // by step
  std::vector<Tensors> parameters;  // by step, behind it
};

Trajectory in_one_process(int world_size, int row_length) {
  Trajectory found;
  const Net net;
  for (size_t step = 0; step < std::size(kSteps); ++step) {
    std::vector<ByRank> batches(num_batches(kSteps[step]));
    for (size_t batch = 0; batch < batches.size(); ++batch) {
      for (int rank = 0; rank < world_size; ++rank) {
        batches[batch].push_back(gradients_of(
            net, input_of(net, rank, step, static_cast<int>(batch))));
      }
    }
    Tensors gradients = average_of(kSteps[step], batches, row_length);
    const torch::NoGradGuard no_grad;
    Tensors parameters;
    for (size_t i = 0; at::Tensor parameter : net.parameters()) {
      parameter.sub_(gradients[i++], kRate);
      parameters.push_back(parameter.clone());
    }
    found.gradients.push_back(std::move(gradients));
    found.parameters.push_back(std::move(parameters));
  }
  return found;
}

struct Strategy {
  std::string name;
  ShardingOptions options;
  size_t blocks_in_unit = 1;
};

// What AddressSanitizer finds does not depend on the order of sums.
#ifdef __SANITIZE_ADDRESS__
const std::vector<size_t> kPrefetchDepths = {1};
const std::vector<size_t> kBlocksInUnit = {1, 3};
#else
const std::vector<size_t> kPrefetchDepths = {0, 1, 2};
const std::vector<size_t> kBlocksInUnit = {1, 2, 3, 4};
#endif

// On rows of this length: each in units of several sizes, at several depths.
std::vector<Strategy> strategies_on(int row_length) {
  std::vector<Strategy> all = {{"full", {}},
                               {"gradients", shard_gradients()},
                               {"optimizer state", shard_optimizer_state()}};
  for (int neighbours = 2; neighbours < row_length; ++neighbours) {
    if (row_length % neighbours != 0) continue;
    all.push_back(
        {absl::StrCat("slices on ", neighbours), {.reshards_to = neighbours}});
  }
  std::vector<Strategy> in_all_ways;
  for (const size_t depth : kPrefetchDepths) {
    for (const size_t blocks : kBlocksInUnit) {
      for (Strategy strategy : all) {
        absl::StrAppend(&strategy.name, ", blocks in a unit ", blocks,
                        ", prefetch ", depth);
        strategy.options.num_shards = row_length;
        strategy.options.prefetch_depth = depth;
        strategy.blocks_in_unit = blocks;
        in_all_ways.push_back(std::move(strategy));
      }
    }
  }
  return in_all_ways;
}

// The head, and so many blocks each.
std::vector<UnitSpec> units_of(const Net& net, size_t blocks_in_unit) {
  std::vector<UnitSpec> blocks = net.units();
  std::vector<UnitSpec> units = {blocks.front()};
  for (size_t i = 1; i < blocks.size(); ++i) {
    if ((i - 1) % blocks_in_unit == 0) {
      units.push_back(blocks[i]);
    } else {
      std::ranges::move(blocks[i].parameters,
                        std::back_inserter(units.back().parameters));
    }
  }
  return units;
}

at::Tensor run(const Net& net, ShardedRoot& root, size_t blocks_in_unit,
               const at::Tensor& input) {
  return root.call(0, input, [&](const at::Tensor& in) {
    at::Tensor h = in;
    for (size_t begin = 0; begin < net.blocks.size(); begin += blocks_in_unit) {
      const size_t end = std::min(begin + blocks_in_unit, net.blocks.size());
      h = root.call(1 + begin / blocks_in_unit, h, [&](const at::Tensor& x) {
        at::Tensor inner = x;
        for (size_t i = begin; i < end; ++i) inner = net.blocks[i].run(inner);
        return inner;
      });
    }
    return h * net.head;
  });
}

void expect_trajectory(const Group& group, const Strategy& strategy,
                       const Trajectory& expected) {
  const int rank = group->getRank();
  const Net net;
  ShardedRoot root(units_of(net, strategy.blocks_in_unit), group,
                   strategy.options);
  for (size_t step = 0; step < std::size(kSteps); ++step) {
    const int count = num_batches(kSteps[step]);
    for (int batch = 0; batch < count; ++batch) {
      const bool is_last = batch == count - 1;
      root.set_synchronizes(kSteps[step] != Batches::kAddedUpHere || is_last);
      root.set_sums_over_replicas(kSteps[step] != Batches::kAddedUpInRows ||
                                  is_last);
      loss_of(root.forward([&] {
        return run(net, root, strategy.blocks_in_unit,
                   input_of(net, rank, step, batch));
      })).backward();
    }
    expect_shards(root, expected.gradients[step], root.shard_rank(),
                  /*of_gradients=*/true);
    sgd(root.shards(), kRate);
    expect_shards(root, expected.parameters[step], root.shard_rank(),
                  /*of_gradients=*/false);
  }
  EXPECT_EQ(root.statistics().late_gathers, 0);
}

// Ranks x length of a row.
class StrategyBitsTest : public ::testing::TestWithParam<std::pair<int, int>> {
};

TEST_P(StrategyBitsTest, EqualOneProcessInTheOrderOfTheMesh) {
  const auto& [world_size, row_length] = GetParam();
  const Trajectory expected = in_one_process(world_size, row_length);
  const std::vector<Strategy> strategies = strategies_on(row_length);
  run_ranks(world_size, [&](const Group& group) {
    for (const Strategy& strategy : strategies) {
      SCOPED_TRACE(absl::StrCat(strategy.name, ", rank ", group->getRank()));
      expect_trajectory(group, strategy, expected);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, StrategyBitsTest,
                         ::testing::Values(std::pair(2, 1), std::pair(2, 2),
                                           std::pair(3, 1), std::pair(3, 3),
                                           std::pair(4, 1), std::pair(4, 2),
                                           std::pair(4, 4), std::pair(8, 1),
                                           std::pair(8, 2), std::pair(8, 4),
                                           std::pair(8, 8)));

// Otherwise the tests above would tell nothing of it.
TEST(StrategyBitsOfReferenceTest, DependOnTheOrder) {
  const Trajectory rows_of_2 = in_one_process(8, 2);
  const Trajectory one_row = in_one_process(8, 8);
  const auto differ = [](const Tensors& a, const Tensors& b) {
    return !std::ranges::equal(
        a, b, [](const auto& x, const auto& y) { return at::equal(x, y); });
  };
  EXPECT_TRUE(differ(rows_of_2.gradients[0], one_row.gradients[0]));
}

// ---- Shapes that fit many ranks badly, some of fewer elements than ranks.

constexpr int kManyRanks = 16;
const std::vector<std::vector<int64_t>> kOddShapes = {
    {}, {0}, {1}, {2, 0, 3}, {1, 1, 1}, {3}, {13}, {17, 5}, {5, 1, 3}, {257}};

// Whole numbers, whose sums are exact; no two of a rank are alike.
Tensors odd_gradients(int rank) {
  Tensors gradients;
  for (size_t i = 0; i < kOddShapes.size(); ++i) {
    const int64_t numel = c10::multiply_integers(kOddShapes[i]);
    const auto first = static_cast<int64_t>(1000 * i + 20'000 * rank + 1);
    gradients.push_back(
        at::arange(first, first + numel, at::kFloat).view(kOddShapes[i]));
  }
  return gradients;
}

TEST(OddShapesTest, GradientsAreTheAveragesOfManyRanks) {
  ByRank gradients;
  for (int rank = 0; rank < kManyRanks; ++rank) {
    gradients.push_back(odd_gradients(rank));
  }
  const Tensors expected = average({gradients}, kManyRanks);
  const auto expect_averages = [&](const Group& group, bool each_is_a_unit) {
    const int rank = group->getRank();
    std::vector<UnitSpec> units;
    for (size_t i = 0; i < kOddShapes.size(); ++i) {
      const std::string name = absl::StrCat("w", i);
      if (each_is_a_unit || units.empty()) units.push_back({.name = name});
      units.back().parameters.push_back(
          {name, torch::ones(kOddShapes[i]).requires_grad_()});
    }
    ShardedRoot root(units, group, {});
    root.forward([&] {
          at::Tensor h = torch::zeros({});
          auto gradient = gradients[rank].begin();
          for (size_t unit = 0; unit < units.size(); ++unit) {
            h = root.call(unit, h, [&](at::Tensor in) {
              for (const NamedParameter& parameter : units[unit].parameters) {
                in = in + (parameter.tensor * *gradient++).sum();
              }
              return in;
            });
          }
          return h;
        })
        .backward();
    expect_shards(root, expected, rank, /*of_gradients=*/true);
  };
  run_ranks(
      kManyRanks,
      [&](const Group& group) {
        for (const bool each_is_a_unit : {false, true}) {
          SCOPED_TRACE(absl::StrCat("rank ", group->getRank(), ", units ",
                                    each_is_a_unit ? "of one" : "of all"));
          expect_averages(group, each_is_a_unit);
        }
      },
      std::chrono::seconds(60));
}

}  // namespace strategy_bits_test
}  // namespace brigade
