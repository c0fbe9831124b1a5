// Sums over a row of ranks and then over its column.

#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/ordered/ordered_collectives.h"
#include "brigade/fsdp/shard_transport.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace ordered_transport_test {

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

  void run(const std::function<void(ShardTransport&, OrderedCollectives& all,
                                    int rank)>& fn) {
    run_ranks(GetParam().size(), [&](const Group& group) {
      OrderedCollectives all(group, {.group_size = row()});
      const auto transport = make_ordered_transport(group, row());
      fn(*transport, all, group->getRank());
    });
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

TEST_P(SumsOfRowsTest, HaveTheBitsOfAnAllReduceRowByRow) {
  run([](ShardTransport& transport, OrderedCollectives& all, int rank) {
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      for (const int64_t shard_numel : {1, 1000, 40003}) {
        const int64_t numel = row() * shard_numel;
        const at::Tensor expected = values_of(rank, numel, dtype);
        all.all_reduce(expected, 0.3)->waitAndThrow();
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
  run([&](ShardTransport& transport, OrderedCollectives&, int rank) {
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

// Large ones in a row are done after small ones that were launched later.
TEST_P(SumsOfRowsTest, ManyInFlight) {
  run([](ShardTransport& transport, OrderedCollectives& all, int rank) {
    std::vector<at::Tensor> inputs;
    std::vector<FuturePtr> in_flight;
    for (uint64_t seed = 0; seed < 30; ++seed) {
      const auto shard_numel =
          static_cast<int64_t>(seed % 3 == 0 ? 100007 : 1 + 10 * seed);
      inputs.push_back(values_of(rank, row() * shard_numel, at::kFloat, seed));
      in_flight.push_back(transport.reduce_scatter(
          inputs[seed], shard_of(inputs[seed], rank), {}));
    }
    for (uint64_t seed = 0; seed < 30; ++seed) {
      in_flight[seed]->waitAndThrow();
      const at::Tensor expected =
          values_of(rank, inputs[seed].numel(), at::kFloat, seed);
      all.all_reduce(expected)->waitAndThrow();
      EXPECT_TRUE(
          at::equal(shard_of(inputs[seed], rank), shard_of(expected, rank)))
          << seed;
    }
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

}  // namespace ordered_transport_test
}  // namespace brigade
