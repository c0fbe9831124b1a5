// Comm hooks of sharding: compression, and hooks of one's own.

#include "brigade/fsdp/units/reduction_hook.h"

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "brigade/fsdp/sharded_root.h"
#include "brigade/tests/fsdp/integer_units.h"
#include "brigade/tests/fsdp/message_of_call.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::HasSubstr;
using testing::IntegerUnits;
using testing::message_of;
using testing::part_of;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

const std::vector<int64_t> kNumels = {7, 30, 1, 13};  // padded by most ranks

// World size, shards, what travels.
class CompressionTest
    : public ::testing::TestWithParam<std::tuple<int, int, at::ScalarType>> {
 protected:
  static int world_size() { return std::get<0>(GetParam()); }
  static int num_shards() { return std::get<1>(GetParam()); }
  static at::ScalarType wire() { return std::get<2>(GetParam()); }
  static bool has_rows() { return num_shards() < world_size(); }

  static ShardingOptions options() {
    return {.num_shards = num_shards(), .comm_hook = compression_hook(wire())};
  }

  // A sum of integers as it arrives.
  static at::Tensor average(const at::Tensor& sum) {
    return sum.to(at::kFloat)
        .mul(1.0 / world_size())
        .to(wire())
        .to(sum.scalar_type());
  }

  static at::Tensor sum_over_ranks(const IntegerUnits& net, size_t unit,
                                   int batch) {
    at::Tensor sum = net.gradient(unit, 0, batch);
    for (int r = 1; r < world_size(); ++r) {
      sum = sum + net.gradient(unit, r, batch);
    }
    return sum;
  }

  // The gradient of a unit's parameter is this rank's part of `whole`.
  static void expect(const ShardedRoot& root, size_t unit,
                     const at::Tensor& whole) {
    const at::Tensor& gradient = root.shards_of(unit)[0].grad();
    ASSERT_TRUE(gradient.defined()) << "unit " << unit;
    const at::Tensor expected =
        part_of(whole, root, unit, 0, root.shard_rank());
    EXPECT_EQ(gradient.scalar_type(), whole.scalar_type());
    EXPECT_TRUE(at::equal(gradient.flatten(), expected))
        << "unit " << unit << ": " << gradient << ", expected " << expected;
  }

  static void zero_grad(const ShardedRoot& root) {
    for (const at::Tensor& shard : root.shards()) {
      shard.mutable_grad() = at::Tensor();
    }
  }
};

TEST_P(CompressionTest, AveragesWhatTravels) {
  run_ranks(world_size(), [&](const Group& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const IntegerUnits net(kNumels, dtype);
      ShardedRoot root(net.units(), group, options());
      for (int step = 0; step < 3; ++step) {
        net.run(root, group->getRank(), step).backward();
        for (size_t unit = 0; unit < kNumels.size(); ++unit) {
          expect(root, unit, average(sum_over_ranks(net, unit, step)));
        }
        zero_grad(root);
      }
      EXPECT_EQ(root.statistics().late_gathers, 0);
    }
  });
}

// Elements of both runs of a large gradient, and of what is behind them.
TEST_P(CompressionTest, LargeUnitsToo) {
  run_ranks(world_size(), [&](const Group& group) {
    const IntegerUnits net({5, 200'003});
    ShardedRoot root(net.units(), group, options());
    net.run(root, group->getRank(), 0).backward();
    expect(root, 1, average(sum_over_ranks(net, 1, 0)));
  });
}

// Each backward's average is added in the reduce dtype; without
// synchronisation, gradients are added up in it before they travel.
TEST_P(CompressionTest, AccumulatesInTheReduceDtype) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, options());
    net.run(root, rank, 0).backward();
    net.run(root, rank, 1).backward();
    for (size_t unit = 0; unit < kNumels.size(); ++unit) {
      expect(root, unit,
             average(sum_over_ranks(net, unit, 0)) +
                 average(sum_over_ranks(net, unit, 1)));
    }
    zero_grad(root);
    const int64_t before = root.statistics().sent_by_sums;
    root.set_synchronizes(false);
    net.run(root, rank, 0).backward();
    EXPECT_EQ(root.statistics().sent_by_sums, before);
    root.set_synchronizes(true);
    net.run(root, rank, 1).backward();
    for (size_t unit = 0; unit < kNumels.size(); ++unit) {
      expect(
          root, unit,
          average(sum_over_ranks(net, unit, 0) + sum_over_ranks(net, unit, 1)));
    }
  });
}

TEST_P(CompressionTest, RowsMayAddUpAlone) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, options());
    root.set_sums_over_replicas(false);
    net.run(root, rank, 0).backward();
    root.set_sums_over_replicas(true);
    if (!has_rows()) zero_grad(root);
    net.run(root, rank, 1).backward();
    for (size_t unit = 0; unit < kNumels.size(); ++unit) {
      const at::Tensor second = sum_over_ranks(net, unit, 1);
      expect(
          root, unit,
          average(has_rows() ? second + sum_over_ranks(net, unit, 0) : second));
    }
  });
}

// What a rank leaves out it sends as zeros; what all do has no gradient; what
// is frozen does not travel.
TEST_P(CompressionTest, BranchesMayDiffer) {
  run_ranks(world_size(), [&](const Group& group) {
    const int rank = group->getRank();
    const IntegerUnits net({7, 30, 12, 13, 5});
    net.parameters[4].requires_grad_(false);
    ShardedRoot root(net.units(), group, options());
    for (int step = 0; step < 3; ++step) {  // the same branches in each
      net.run(root, rank, step,
              rank == 0 ? std::set<size_t>{3} : std::set<size_t>{1, 3})
          .backward();
      expect(root, 0, average(sum_over_ranks(net, 0, step)));
      expect(root, 1, average(net.gradient(1, 0, step)));
      expect(root, 2, average(sum_over_ranks(net, 2, step)));
      EXPECT_FALSE(root.shards_of(3)[0].grad().defined());
      EXPECT_FALSE(root.shards_of(4)[0].grad().defined());
      zero_grad(root);
    }
  });
}

// By half for float32, over rows and columns; gathers are as they were.
TEST_P(CompressionTest, SendsFewerBytes) {
  run_ranks(world_size(), [&](const Group& group) {
    const auto sent_with = [&](const ShardingOptions& chosen) {
      const IntegerUnits net(kNumels);
      ShardedRoot root(net.units(), group, chosen);
      net.run(root, group->getRank(), 0).backward();
      return root.statistics();
    };
    const ShardingStatistics plain = sent_with({.num_shards = num_shards()});
    const ShardingStatistics compressed = sent_with(options());
    EXPECT_EQ(compressed.sent_by_sums * 2, plain.sent_by_sums);
    EXPECT_EQ(compressed.sent_by_gathers, plain.sent_by_gathers);
    EXPECT_GT(compressed.sent_by_sums, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(, CompressionTest,
                         ::testing::Values(std::tuple(2, 2, at::kHalf),
                                           std::tuple(2, 1, at::kBFloat16),
                                           std::tuple(3, 3, at::kBFloat16),
                                           std::tuple(4, 2, at::kHalf)));

at::Tensor run_once(ShardedRoot& root, const at::Tensor& weight,
                    double gradient) {
  return root.forward([&] {
    return root.call(0, torch::ones({}), [&](const at::Tensor& in) {
      return (weight * gradient).sum() + in;
    });
  });
}

std::vector<UnitSpec> one_unit(const at::Tensor& weight) {
  return {{.name = "", .parameters = {{"w", weight}}}};
}

// 2049 is no float16: it is one only on the way, not where it is added up.
TEST(ReductionHookTest, GradientsAreRoundedOnTheWayOnly) {
  run_ranks(2, [&](const Group& group) {
    const auto train = [&](const std::shared_ptr<ReductionHook>& hook,
                           std::vector<double> gradients) {
      const at::Tensor weight = torch::ones({6}).requires_grad_();
      ShardedRoot root(one_unit(weight), group, {.comm_hook = hook});
      for (size_t i = 0; i < gradients.size(); ++i) {
        root.set_synchronizes(i + 1 == gradients.size());
        run_once(root, weight, group->getRank() == 0 ? gradients[i] : 0)
            .backward();
      }
      return root.shards()[0].grad()[0].item<double>();
    };
    EXPECT_EQ(train(nullptr, {2049}), 1024.5);
    EXPECT_EQ(train(compression_hook(at::kHalf), {2049}), 1024);
    EXPECT_EQ(train(compression_hook(at::kHalf), {2048, 1, 1}), 1025);
  });
}

// What is as short as the wire is not made another thing of.
TEST(ReductionHookTest, ShortGradientsTravelAsTheyAre) {
  run_ranks(2, [&](const Group& group) {
    const at::Tensor weight = torch::ones({6}).requires_grad_();
    ShardedRoot root(one_unit(weight), group,
                     {.reduce_dtype = at::kBFloat16,
                      .comm_hook = compression_hook(at::kHalf)});
    run_once(root, weight, 65536).backward();  // no float16
    EXPECT_EQ(root.shards()[0].grad()[0].item<double>(), 65536);
  });
}

TEST(ReductionHookTest, OtherDtypesAreRefused) {
  EXPECT_THAT(message_of([] { compression_hook(at::kFloat); }),
              HasSubstr("expected Half or BFloat16 for what travels, found "
                        "Float"));
}

TEST(ReductionHookTest, RanksHaveOneHook) {
  run_ranks(2, [&](const Group& group) {
    const at::Tensor weight = torch::ones({6}).requires_grad_();
    const std::string message = message_of([&] {
      ShardedRoot root(
          one_unit(weight), group,
          {.comm_hook =
               group->getRank() == 0 ? compression_hook(at::kHalf) : nullptr});
    });
    EXPECT_THAT(message, HasSubstr("comm_hook fp16_compress"));
    EXPECT_THAT(message, HasSubstr("comm_hook none"));
    EXPECT_TRUE((weight == 1).all().item<bool>());  // whole, as it was
  });
}

// Limits gradients before they are summed. Throws once, if it is told to.
class Clipped final : public ReductionHook {
 public:
  FuturePtr reduce(ShardTransport& transport,
                   const Reduction& reduction) override {
    ++num_calls;
    TORCH_CHECK(!std::exchange(fails, false), "the hook has failed");
    reduction.whole.clamp_(-3, 3);
    return transport.reduce_scatter(reduction.whole, reduction.shard,
                                    reduction.sum);
  }
  std::string hook_name() const override { return "clipped"; }

  int num_calls = 0;
  bool fails = false;
};

TEST(ReductionHookTest, MayBeOnesOwn) {
  for (const int num_shards : {2, 1}) {
    run_ranks(2, [&](const Group& group) {
      const auto hook = std::make_shared<Clipped>();
      const IntegerUnits net(kNumels);
      ShardedRoot root(net.units(), group,
                       {.num_shards = num_shards, .comm_hook = hook});
      for (int step = 0; step < 2; ++step) {
        net.run(root, group->getRank(), step).backward();
        for (size_t unit = 0; unit < kNumels.size(); ++unit) {
          const at::Tensor sum = net.gradient(unit, 0, step).clamp(-3, 3) +
                                 net.gradient(unit, 1, step).clamp(-3, 3);
          const at::Tensor& shard = root.shards_of(unit)[0];
          EXPECT_TRUE(
              at::equal(shard.grad().flatten(),
                        part_of(sum / 2, root, unit, 0, root.shard_rank())));
          shard.mutable_grad() = at::Tensor();
        }
      }
      EXPECT_EQ(hook->num_calls, 2 * static_cast<int>(kNumels.size()));
    });
  }
}

TEST(ReductionHookTest, OneThatThrowsIsAnErrorOnAll) {
  run_ranks(2, [&](const Group& group) {
    const auto hook = std::make_shared<Clipped>();
    const IntegerUnits net(kNumels);
    ShardedRoot root(net.units(), group, {.comm_hook = hook});
    net.run(root, group->getRank(), 0).backward();
    hook->fails = group->getRank() == 1;
    EXPECT_THAT(
        message_of([&] { net.run(root, group->getRank(), 0).backward(); }),
        HasSubstr("the hook has failed"));
  });
}

}  // namespace
}  // namespace brigade
