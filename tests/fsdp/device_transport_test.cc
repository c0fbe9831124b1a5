// What is launched where is shown on a simulated device
// (tests/simulated_device); here are the values, over Gloo.

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/ScopeExit.h>
#include <torch/torch.h>

#include <cstdint>
#include <latch>
#include <tuple>
#include <vector>

#include "brigade/fsdp/shard_transport.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace device_transport_test {

using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int64_t kShardNumel = 37;

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}

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
          random({row * kShardNumel}, 7 + group->getRank()).to(dtype);
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

TEST(DeviceSumsTest, InOrderSendAsManyBytesInARow) {
  run_ranks(4, [](const Group& group) {
    for (const int row : {4, 2}) {
      const auto transport = make_device_transport(
          group, row, ShardingStreams(at::kCPU), {}, /*in_order=*/true);
      const at::Tensor whole = torch::ones({row * kShardNumel});
      transport->reduce_scatter(whole, torch::zeros({kShardNumel}), {})
          ->waitAndThrow();
      const int64_t shard_bytes = kShardNumel * 4;
      EXPECT_EQ(transport->sent().by_sums,
                shard_bytes * (row - 1) + shard_bytes * (4 / row - 1));
    }
  });
}

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
      const auto gather = transport->all_gather(gathered);
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

}  // namespace device_transport_test
}  // namespace brigade
