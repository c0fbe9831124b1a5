// Sums over a row of ranks and then over its column, of CPUs and of devices,
// the latter over Gloo. What is launched on which stream is tested on a
// simulated device (tests/simulated_device).

#include "brigade/fsdp/shard_transport.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/ScopeExit.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/ordered/ordered_sum.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace shard_transport_test {

using testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using FuturePtr = ShardTransport::FuturePtr;

struct Shape {
  int num_rows;
  int row;

  int size() const { return num_rows * row; }
};

// Over so many decades that the order of additions shows.
at::Tensor values_of(int rank, int64_t numel, at::ScalarType dtype,
                     uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      seed * 1000 + static_cast<uint64_t>(rank));
  return (at::randn({numel}, generator, at::kDouble) *
          at::pow(10, at::randint(-2, 3, {numel}, generator, at::kDouble)))
      .to(dtype);
}

class SumsOfRowsTest : public ::testing::TestWithParam<Shape> {
 protected:
  static int row() { return GetParam().row; }

  void run(const std::function<void(ShardTransport&, int rank)>& fn) {
    run_ranks(GetParam().size(), [&](const Group& group) {
      const auto transport = make_ordered_transport(group, row());
      fn(*transport, group->getRank());
    });
  }

  // Of values_of(), row by row.
  static at::Tensor scaled_sum(int64_t numel, at::ScalarType dtype,
                               double scale) {
    std::vector<at::Tensor> sums;
    const bool is_all = GetParam().num_rows == 1;  // rounded once
    for (int first = 0; first < GetParam().size(); first += row()) {
      std::vector<at::Tensor> terms;
      for (int rank = first; rank < first + row(); ++rank) {
        terms.push_back(values_of(rank, numel, dtype));
      }
      sums.push_back(at::empty({numel}, dtype));
      ordered_sum(terms, is_all ? std::optional(scale) : std::nullopt,
                  sums.back());
    }
    if (is_all) return sums[0];
    at::Tensor sum = at::empty({numel}, dtype);
    ordered_sum(sums, scale, sum);
    return sum;
  }

  static at::Tensor shard_of(const at::Tensor& whole, int rank) {
    const int64_t numel = whole.numel() / row();
    return whole.narrow(0, rank % row() * numel, numel);
  }
};
INSTANTIATE_TEST_SUITE_P(Shapes, SumsOfRowsTest,
                         ::testing::Values(Shape{1, 1}, Shape{1, 3},
                                           Shape{3, 1}, Shape{2, 2},
                                           Shape{2, 3}, Shape{3, 2}),
                         [](const auto& shape) {
                           return absl::StrCat(shape.param.num_rows, "x",
                                               shape.param.row);
                         });

TEST_P(SumsOfRowsTest, HaveTheBitsOfOrderedSumsRowByRow) {
  run([](ShardTransport& transport, int rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const int64_t shard_numel : {1, 1000, 40003}) {
        const int64_t numel = row() * shard_numel;
        const at::Tensor expected = scaled_sum(numel, dtype, 0.3);
        const at::Tensor whole = values_of(rank, numel, dtype);
        const at::Tensor shard = at::empty({shard_numel}, dtype);
        const FuturePtr future =
            transport.reduce_scatter(whole, shard, {.scale = 0.3});
        future->waitAndThrow();
        EXPECT_TRUE(at::equal(shard, shard_of(expected, rank)))
            << dtype << ' ' << shard_numel;
        EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(shard));
        EXPECT_TRUE(at::equal(whole, values_of(rank, numel, dtype)));
      }
    }
  });
}

TEST_P(SumsOfRowsTest, AddTheRowsEarlierSum) {
  if (GetParam().num_rows == 1) GTEST_SKIP() << "a row is all";
  const int64_t numel = row() * 4003;
  const auto sum_of_row = [&](int r, uint64_t seed) {
    at::Tensor sum = values_of(r * row(), numel, at::kFloat, seed);
    for (int i = 1; i < row(); ++i) {
      sum.add_(values_of(r * row() + i, numel, at::kFloat, seed));
    }
    return sum;
  };
  at::Tensor expected = sum_of_row(0, 2) + sum_of_row(0, 1);
  for (int r = 1; r < GetParam().num_rows; ++r) {
    expected = expected + (sum_of_row(r, 2) + sum_of_row(r, 1));
  }
  expected = expected * 0.3;
  run([&](ShardTransport& transport, int rank) {
    const at::Tensor before = at::empty({4003});
    transport
        .reduce_scatter(values_of(rank, numel, at::kFloat, 1), before,
                        {.over_replicas = false})
        ->waitAndThrow();
    const at::Tensor shard = at::empty({4003});
    transport
        .reduce_scatter(values_of(rank, numel, at::kFloat, 2), shard,
                        {.scale = 0.3, .of_row = before})
        ->waitAndThrow();
    EXPECT_TRUE(at::equal(shard, shard_of(expected, rank)));
  });
}

// Also in rows and columns that the last rank is not in.
TEST_P(SumsOfRowsTest, ARankThatLeavesEndsAllInFlight) {
  if (GetParam().size() == 1) GTEST_SKIP() << "there is nobody to leave";
  run_ranks(
      GetParam().size(),
      [&](const Group& group) {
        auto transport = make_ordered_transport(group, row());
        const auto reduce = [&] {
          return transport->reduce_scatter(at::ones({row() * 100000}),
                                           at::empty({100000}), {});
        };
        reduce()->waitAndThrow();
        std::vector<at::Tensor> ones = {at::ones(10)};
        group->allreduce(ones)->wait();  // all have the first one
        if (group->getRank() == GetParam().size() - 1) {
          transport.reset();
        } else {
          const auto launch_and_wait = [&] {
            std::vector<FuturePtr> in_flight;
            for (int i = 0; i < 5; ++i) in_flight.push_back(reduce());
            in_flight.back()->waitAndThrow();
          };
          EXPECT_THROW(launch_and_wait(), PeerError);
          EXPECT_THROW(reduce()->waitAndThrow(), PeerError);
        }
        ones = {at::ones(10)};
        group->allreduce(ones)->wait();
        EXPECT_EQ(ones[0][0].item<int>(), GetParam().size());
      },
      std::chrono::minutes(10));
}

// ---- Devices.

constexpr int64_t kShardNumel = 37;

// Ranks x length of a row.
class DeviceSumsOfRanksTest
    : public ::testing::TestWithParam<std::tuple<int, int>> {};

// Drawn values, as sums of whole numbers would hide the order.
TEST_P(DeviceSumsOfRanksTest, HaveTheBitsOfTheCpusInOrder) {
  const auto& [world_size, num_shards] = GetParam();
  run_ranks(world_size, [row = num_shards](const Group& group) {
    const auto on_cpu = make_ordered_transport(group, row);
    const auto on_device = make_device_transport(
        group, row, ShardingStreams(at::kCPU), {}, /*in_order=*/true);
    EXPECT_TRUE(on_device->scales());
    for (const at::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const at::Tensor whole =
          values_of(group->getRank(), row * kShardNumel, dtype);
      const at::Tensor before = whole.clone();
      for (const bool over_replicas : {true, false}) {
        const ShardTransport::Sum sum = {
            .scale = over_replicas ? 1.0 / group->getSize() : 1,
            .over_replicas = over_replicas};
        const at::Tensor expected = torch::zeros({kShardNumel}, dtype);
        const at::Tensor found = torch::zeros({kShardNumel}, dtype);
        on_cpu->reduce_scatter(whole, expected, sum)->waitAndThrow();
        on_device->reduce_scatter(whole, found, sum)->waitAndThrow();
        EXPECT_TRUE(at::equal(found, expected))
            << dtype << (over_replicas ? "" : ", in a row");
        EXPECT_TRUE(at::equal(whole, before));
      }
    }
  });
}

// Of whole numbers, whose order does not show.
TEST_P(DeviceSumsOfRanksTest, NeedNoSumsOfSlicesOverGloo) {
  const auto& [world_size, num_shards] = GetParam();
  run_ranks(world_size, [row = num_shards](const Group& group) {
    const auto on_cpu = make_ordered_transport(group, row);
    const auto over_gloo = make_device_transport(
        group, row, ShardingStreams(at::kCPU), {}, /*in_order=*/false);
    const at::Tensor whole =
        at::arange(static_cast<double>(row * kShardNumel), at::kFloat) +
        1000 * group->getRank();
    const at::Tensor of_row = at::full({kShardNumel}, 3.0 + group->getRank());
    for (const bool over_replicas : {true, false}) {
      ShardTransport::Sum sum = {.over_replicas = over_replicas};
      if (over_replicas) sum.of_row = of_row;
      const at::Tensor expected = torch::zeros({kShardNumel});
      const at::Tensor found = torch::zeros({kShardNumel});
      on_cpu->reduce_scatter(whole, expected, sum)->waitAndThrow();
      over_gloo->reduce_scatter(whole.clone(), found, sum)->waitAndThrow();
      EXPECT_TRUE(at::equal(found, expected)) << over_replicas;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, DeviceSumsOfRanksTest,
                         ::testing::Values(std::tuple(1, 1), std::tuple(2, 2),
                                           std::tuple(3, 3), std::tuple(4, 4),
                                           std::tuple(3, 1), std::tuple(4, 2),
                                           std::tuple(6, 2)));

// Of the CPU, in a row of two or on two replicas. Else a rank would wait inside
// of a call for a peer that has not come to it.
TEST(OrderedTransportTest, CallsReturnBeforeThePeerLaunches) {
  for (const int row : {2, 1}) {
    std::latch launched(1);
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      const auto transport = make_ordered_transport(group, row);
      const at::Tensor slices = at::arange(row * kShardNumel, at::kFloat);
      const int64_t begin = transport->shard_rank() * kShardNumel;
      const at::Tensor own = slices.narrow(0, begin, kShardNumel);
      const at::Tensor gathered = at::zeros({row * kShardNumel});
      gathered.narrow(0, begin, kShardNumel).copy_(own);
      const at::Tensor whole = slices + 1000 * rank;
      const at::Tensor sum = at::zeros({kShardNumel});
      auto tell = c10::make_scope_exit([&] {
        if (rank == 0) launched.count_down();
      });
      if (rank == 1) launched.wait();
      const auto gather = transport->all_gather(gathered, row);
      const auto reduction = transport->reduce_scatter(whole, sum, {});
      if (rank == 0) launched.count_down();
      tell.release();
      gather->waitAndThrow();
      reduction->waitAndThrow();
      EXPECT_TRUE(at::equal(gathered, slices)) << row;
      EXPECT_TRUE(at::equal(sum, 2 * own + 1000)) << row;
    });
  }
}

}  // namespace shard_transport_test
}  // namespace brigade
