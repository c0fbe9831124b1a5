// Reductions over shard groups, then replica groups: on CPUs, and by the device
// transport over Gloo. tests/simulated_device tests the order of streams.

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
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace shard_transport_test {

using testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using FuturePtr = ShardTransport::FuturePtr;

struct Mesh {
  int num_replicas;
  int num_shards;

  int size() const { return num_replicas * num_shards; }
};

// Values over five decades, so that the order of additions changes the bits.
at::Tensor values_of(int rank, int64_t numel, at::ScalarType dtype,
                     uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      seed * 1000 + static_cast<uint64_t>(rank));
  return (at::randn({numel}, generator, at::kDouble) *
          at::pow(10, at::randint(-2, 3, {numel}, generator, at::kDouble)))
      .to(dtype);
}

class OrderedReductionTest : public ::testing::TestWithParam<Mesh> {
 protected:
  static int num_shards() { return GetParam().num_shards; }

  void run(const std::function<void(ShardTransport&, int rank)>& fn) {
    run_ranks(GetParam().size(), [&](const Group& group) {
      const auto transport = make_ordered_transport(group, num_shards());
      fn(*transport, group->getRank());
    });
  }

  // The expected reduction of values_of() of all ranks.
  static at::Tensor scaled_sum(int64_t numel, at::ScalarType dtype,
                               double scale) {
    std::vector<at::Tensor> sums;
    const bool has_replicas = GetParam().num_replicas > 1;
    for (int first = 0; first < GetParam().size(); first += num_shards()) {
      std::vector<at::Tensor> terms;
      for (int rank = first; rank < first + num_shards(); ++rank) {
        terms.push_back(values_of(rank, numel, dtype));
      }
      sums.push_back(at::empty({numel}, dtype));
      ordered_sum(terms, has_replicas ? std::nullopt : std::optional(scale),
                  sums.back());
    }
    if (!has_replicas) return sums[0];
    at::Tensor sum = at::empty({numel}, dtype);
    ordered_sum(sums, scale, sum);
    return sum;
  }

  static at::Tensor shard_of(const at::Tensor& whole, int rank) {
    const int64_t numel = whole.numel() / num_shards();
    return whole.narrow(0, rank % num_shards() * numel, numel);
  }
};
INSTANTIATE_TEST_SUITE_P(Meshes, OrderedReductionTest,
                         ::testing::Values(Mesh{1, 1}, Mesh{1, 3}, Mesh{3, 1},
                                           Mesh{2, 2}, Mesh{2, 3}, Mesh{3, 2}),
                         [](const auto& mesh) {
                           return absl::StrCat(mesh.param.num_replicas, "x",
                                               mesh.param.num_shards);
                         });

TEST_P(OrderedReductionTest, HasTheBitsOfOrderedSums) {
  run([](ShardTransport& transport, int rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const int64_t shard_numel : {1, 1000, 40003}) {
        const int64_t numel = num_shards() * shard_numel;
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

TEST_P(OrderedReductionTest, AddsAnEarlierPartialSum) {
  if (GetParam().num_replicas == 1) GTEST_SKIP() << "needs replicas";
  const int64_t numel = num_shards() * 4003;
  const auto shard_group_sum = [&](int r, uint64_t seed) {
    at::Tensor sum = values_of(r * num_shards(), numel, at::kFloat, seed);
    for (int i = 1; i < num_shards(); ++i) {
      sum.add_(values_of(r * num_shards() + i, numel, at::kFloat, seed));
    }
    return sum;
  };
  at::Tensor expected = shard_group_sum(0, 2) + shard_group_sum(0, 1);
  for (int r = 1; r < GetParam().num_replicas; ++r) {
    expected = expected + (shard_group_sum(r, 2) + shard_group_sum(r, 1));
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
                        {.scale = 0.3, .partial_sum = before})
        ->waitAndThrow();
    EXPECT_TRUE(at::equal(shard, shard_of(expected, rank)));
  });
}

// Also in groups that do not contain the last rank.
TEST_P(OrderedReductionTest, ARankThatLeavesEndsAllReductionsInFlight) {
  if (GetParam().size() == 1) GTEST_SKIP() << "needs a second rank";
  run_ranks(
      GetParam().size(),
      [&](const Group& group) {
        auto transport = make_ordered_transport(group, num_shards());
        const auto reduce = [&] {
          return transport->reduce_scatter(at::ones({num_shards() * 100000}),
                                           at::empty({100000}), {});
        };
        reduce()->waitAndThrow();
        std::vector<at::Tensor> ones = {at::ones(10)};
        group->allreduce(ones)->wait();  // all ranks have the first reduction
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

// World size, number of shards.
class DeviceReductionTest
    : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(DeviceReductionTest, HasTheCpusBitsInRankOrder) {
  const auto& [world_size, num_shards] = GetParam();
  run_ranks(world_size, [num_shards = num_shards](const Group& group) {
    const auto on_cpu = make_ordered_transport(group, num_shards);
    const auto on_device = make_device_transport(
        group, num_shards, ShardingStreams(at::kCPU), {}, /*in_order=*/true);
    EXPECT_TRUE(on_device->scales());
    for (const at::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const at::Tensor whole =
          values_of(group->getRank(), num_shards * kShardNumel, dtype);
      const at::Tensor before = whole.clone();
      for (const bool over_replicas : {true, false}) {
        const ShardTransport::ReduceOptions options = {
            .scale = over_replicas ? 1.0 / group->getSize() : 1,
            .over_replicas = over_replicas};
        const at::Tensor expected = torch::zeros({kShardNumel}, dtype);
        const at::Tensor found = torch::zeros({kShardNumel}, dtype);
        on_cpu->reduce_scatter(whole, expected, options)->waitAndThrow();
        on_device->reduce_scatter(whole, found, options)->waitAndThrow();
        EXPECT_TRUE(at::equal(found, expected))
            << dtype << (over_replicas ? "" : ", in a shard group");
        EXPECT_TRUE(at::equal(whole, before));
      }
    }
  });
}

// Integer values: every order of additions gives the same bits.
TEST_P(DeviceReductionTest, NeedsNoReduceScatterOverGloo) {
  const auto& [world_size, num_shards] = GetParam();
  run_ranks(world_size, [num_shards = num_shards](const Group& group) {
    const auto on_cpu = make_ordered_transport(group, num_shards);
    const auto over_gloo = make_device_transport(
        group, num_shards, ShardingStreams(at::kCPU), {}, /*in_order=*/false);
    const at::Tensor whole =
        at::arange(static_cast<double>(num_shards * kShardNumel), at::kFloat) +
        1000 * group->getRank();
    const at::Tensor partial_sum =
        at::full({kShardNumel}, 3.0 + group->getRank());
    for (const bool over_replicas : {true, false}) {
      ShardTransport::ReduceOptions options = {.over_replicas = over_replicas};
      if (over_replicas) options.partial_sum = partial_sum;
      const at::Tensor expected = torch::zeros({kShardNumel});
      const at::Tensor found = torch::zeros({kShardNumel});
      on_cpu->reduce_scatter(whole, expected, options)->waitAndThrow();
      over_gloo->reduce_scatter(whole.clone(), found, options)->waitAndThrow();
      EXPECT_TRUE(at::equal(found, expected)) << over_replicas;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, DeviceReductionTest,
                         ::testing::Values(std::tuple(1, 1), std::tuple(2, 2),
                                           std::tuple(3, 3), std::tuple(4, 4),
                                           std::tuple(3, 1), std::tuple(4, 2),
                                           std::tuple(6, 2)));

// On two shards, then on two replicas.
TEST(OrderedTransportTest, CallsReturnBeforeThePeerLaunches) {
  for (const int num_shards : {2, 1}) {
    std::latch launched(1);
    run_ranks(2, [&](const Group& group) {
      const int rank = group->getRank();
      const auto transport = make_ordered_transport(group, num_shards);
      const at::Tensor slices =
          at::arange(num_shards * kShardNumel, at::kFloat);
      const int64_t begin = transport->shard_rank() * kShardNumel;
      const at::Tensor own = slices.narrow(0, begin, kShardNumel);
      const at::Tensor gathered = at::zeros({num_shards * kShardNumel});
      gathered.narrow(0, begin, kShardNumel).copy_(own);
      const at::Tensor whole = slices + 1000 * rank;
      const at::Tensor sum = at::zeros({kShardNumel});
      auto unblock_peer = c10::make_scope_exit([&] {
        if (rank == 0) launched.count_down();
      });
      if (rank == 1) launched.wait();
      const auto gather = transport->all_gather(gathered, num_shards);
      const auto reduction = transport->reduce_scatter(whole, sum, {});
      if (rank == 0) launched.count_down();
      unblock_peer.release();
      gather->waitAndThrow();
      reduction->waitAndThrow();
      EXPECT_TRUE(at::equal(gathered, slices)) << num_shards;
      EXPECT_TRUE(at::equal(sum, 2 * own + 1000)) << num_shards;
    });
  }
}

}  // namespace shard_transport_test
}  // namespace brigade
