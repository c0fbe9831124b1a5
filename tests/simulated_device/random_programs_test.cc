// Random programs of a sharded model on every layout of streams: repeated calls
// of units, several forwards before a backward, evaluations.

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <tuple>
#include <vector>

#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade {
namespace random_programs_test {

using testing::on_every_layout;
using testing::ShardedProgram;
using testing::ShardedTraining;

constexpr int kNumPrograms = 3;
constexpr int kStepsOfAProgram = 4;

class RandomProgram {
 public:
  explicit RandomProgram(std::mt19937& draw) {
    const auto up_to = [&draw](int most) {
      return std::uniform_int_distribution<int>(0, most)(draw);
    };
    for (int left = 1 + up_to(2); left > 0; --left) {
      std::vector<size_t>& units = forwards_.emplace_back();
      for (int calls = 1 + up_to(3); calls > 0; --calls) {
        units.push_back(1 + up_to(ShardedTraining::kNumUnits - 2));
      }
    }
    evaluates_ = up_to(3) == 0;
  }

  void step(ShardedTraining& training, int step) const {
    at::Tensor loss;
    for (const std::vector<size_t>& units : forwards_) {
      const at::Tensor one = training.forward_through(units, step);
      loss = loss.defined() ? loss + one : one;
    }
    if (evaluates_) {
      const torch::NoGradGuard no_grad;
      training.forward_through({1}, step);
    }
    loss.backward();
    for (size_t unit = 0; unit < ShardedTraining::kNumUnits; ++unit) {
      const int64_t calls = num_calls_of(unit);
      if (calls > 0) training.expect_gradients_of(unit, step, calls);
    }
    training.update();
  }

 private:
  int64_t num_calls_of(size_t unit) const {
    if (unit == 0) return static_cast<int64_t>(forwards_.size());
    int64_t calls = 0;
    for (const std::vector<size_t>& units : forwards_) {
      calls += std::ranges::count(units, unit);
    }
    return calls;
  }

  std::vector<std::vector<size_t>> forwards_;  // inner units, in order
  bool evaluates_ = false;
};

// num_shards, prefetch_depth, calls_on_own_stream, seed.
class RandomProgramsStreamsTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, int, bool, int>> {};

// The last step of each program uses recorded schedules.
TEST_P(RandomProgramsStreamsTest, GradientsAreExact) {
  const auto [num_shards, depth, on_own_streams, seed] = GetParam();
  std::mt19937 draw(seed);
  const FullyShardOptions options = {
      .num_shards = num_shards, .prefetch_depth = static_cast<size_t>(depth)};
  const ShardedProgram calls = {.calls_on_own_stream = on_own_streams};
  on_every_layout(options, calls, [&](ShardedTraining& training) {
    for (int p = 0; p < kNumPrograms; ++p) {
      const RandomProgram program(draw);
      int64_t learned = 0;
      for (int s = 0; s < kStepsOfAProgram; ++s) {
        learned = training.sharded().statistics().learned_segments;
        program.step(training, s);
      }
      EXPECT_EQ(training.sharded().statistics().learned_segments, learned);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, RandomProgramsStreamsTest,
                         ::testing::Combine(::testing::Values(4, 2),
                                            ::testing::Values(0, 1, 2),
                                            ::testing::Bool(),
                                            ::testing::Values(1)));

}  // namespace random_programs_test
}  // namespace brigade
