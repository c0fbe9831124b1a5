// Sharded training on every layout of streams: what is gathered, computed,
// summed and delivered is ordered, and memory is lent again only behind that.

#include <torch/torch.h>

#include <string>
#include <tuple>
#include <vector>

#include "brigade/tests/simulated_device/sharded_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::all_stream_layouts;
using testing::ShardedProgram;
using testing::ShardedTraining;
using testing::StreamLayout;

// Shards, kept from forward to backward, prefetch depth, calls on own streams.
class FsdpStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, bool, int, bool>> {
 protected:
  static ShardingOptions options() {
    return {.num_shards = std::get<0>(GetParam()),
            .reshards_after_forward = !std::get<1>(GetParam()),
            .prefetch_depth = static_cast<size_t>(std::get<2>(GetParam()))};
  }
  static ShardedProgram program() {
    return {.calls_on_own_stream = std::get<3>(GetParam())};
  }

  // A call of a unit, with all that it computes. A checkpoint orders nothing
  // else: what one node of it computes again, nodes on other streams read.
  static bool has_one_stream(const StreamLayout& layout,
                             const ShardedProgram& program) {
    return layout.forward == StreamLayout::Forward::kCaller ||
           (layout.forward == StreamLayout::Forward::kSide &&
            program.calls_on_own_stream);
  }

  // On every layout, `body` with a training that ends before races are counted.
  template <typename Body>
  static void on_every_layout(const ShardingOptions& options,
                              const ShardedProgram& program, const Body& body) {
    for (const StreamLayout& layout : all_stream_layouts()) {
      if (program.checkpoint && !has_one_stream(layout, program)) continue;
      SCOPED_TRACE(name_of(layout));
      {
        ShardedTraining training(layout, options, program);
        body(training);
      }
      simulated::expect_no_races();
    }
  }
};

void train(ShardedTraining& training, int num_steps = 4) {
  for (int s = 0; s < num_steps; ++s) {
    training.step(s);
    training.expect_gradients(s);
    training.update();
    training.zero_grad();
  }
  EXPECT_EQ(training.root().engine_statistics().reduced, num_steps);
}

TEST_P(FsdpStreamsTest, Trains) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    train(training);
    EXPECT_EQ(training.root().statistics().late_gathers, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(, FsdpStreamsTest,
                         ::testing::Combine(::testing::Values(4, 2, 1),
                                            ::testing::Bool(),
                                            ::testing::Values(0, 1, 2),
                                            ::testing::Bool()));

using OtherFsdpStreamsTest = FsdpStreamsTest;

TEST_P(OtherFsdpStreamsTest, TrainsInLowerPrecision) {
  for (const at::ScalarType reduce : {at::kFloat, at::kBFloat16}) {
    ShardingOptions mixed = options();
    mixed.param_dtype = at::kBFloat16;
    mixed.reduce_dtype = reduce;
    on_every_layout(mixed, program(),
                    [](ShardedTraining& training) { train(training, 3); });
  }
}

TEST_P(OtherFsdpStreamsTest, ComputesAgainInBackward) {
  for (const bool reentrant : {false, true}) {
    SCOPED_TRACE(reentrant);
    ShardedProgram again = program();
    again.checkpoint = {.reentrant = reentrant, .preserve_rng_state = false};
    on_every_layout(options(), again,
                    [](ShardedTraining& training) { train(training, 3); });
  }
}

// Parts of a unit, and all of one: weights that no gradient tells of are read
// in backward too.
TEST_P(OtherFsdpStreamsTest, TrainsAPart) {
  ShardedProgram part = program();
  part.frozen = {1, 2, 3, 4};
  on_every_layout(options(), part,
                  [](ShardedTraining& training) { train(training, 3); });
}

// All ranks leave out the same: its gradients stay as they are.
TEST_P(OtherFsdpStreamsTest, LeavesUnitsOut) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (size_t left_out = 1; left_out < ShardedTraining::kNumUnits;
         ++left_out) {
      training.step(1, {left_out});
      training.expect_gradients(1, /*factor=*/1, {left_out});
      for (const at::Tensor& shard : training.root().shards_of(left_out)) {
        EXPECT_FALSE(shard.grad().defined());
      }
      training.update();
      training.zero_grad();
    }
    EXPECT_EQ(training.root().engine_statistics().reduced, 2);
  });
}

TEST_P(OtherFsdpStreamsTest, EvaluatesInBetween) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (int s = 0; s < 3; ++s) {
      const at::Tensor loss = training.forward(s);
      {
        const torch::NoGradGuard no_grad;
        training.forward(s);
      }
      loss.backward();
      training.expect_gradients(s);
      training.update();
      training.zero_grad();
    }
  });
}

TEST_P(OtherFsdpStreamsTest, WritesWholeParameters) {
  on_every_layout(options(), program(), [](ShardedTraining& training) {
    for (int s = 0; s < 2; ++s) {
      training.root().unshard();
      {
        const torch::NoGradGuard no_grad;
        for (at::Tensor parameter : training.model().parameters()) {
          parameter.mul_(1);
        }
      }
      training.root().reshard(/*writes=*/true);
      training.step(s);
      training.expect_gradients(s);
      training.zero_grad();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, OtherFsdpStreamsTest,
                         ::testing::Values(std::tuple(4, false, 1, false),
                                           std::tuple(4, true, 2, true),
                                           std::tuple(2, false, 0, true),
                                           std::tuple(1, false, 1, false)));

}  // namespace
}  // namespace brigade
