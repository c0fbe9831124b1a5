#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "brigade/examples/gpt/corpus.h"
#include "brigade/examples/gpt/training.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::gpt {
namespace {

using testing::run_ranks;
using ::testing::StartsWith;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// The bits of matrix products depend on the number of threads.
const bool kComputesOnOneThread = (at::set_num_threads(1), true);

TrainingOptions small(FullyShardOptions sharding = {}) {
  sharding.output_dtype = at::kFloat;
  return {
      .sharding = sharding,
      .shape = {.num_blocks = 3, .width = 20, .num_heads = 2, .context = 16},
      .batch_size = 4};
}

class GptTest : public ::testing::Test {
 protected:
  const Corpus corpus_;

  // Returns rank 0's losses. Expects the same on all ranks.
  std::vector<double> losses(int num_ranks, const TrainingOptions& options,
                             int64_t steps) const {
    std::vector<std::vector<double>> losses(num_ranks);
    run_ranks(num_ranks, [&](const Group& group) {
      Training training(group, corpus_, options);
      for (int64_t step = 0; step < steps; ++step) {
        losses[group->getRank()].push_back(training.step(step));
      }
    });
    EXPECT_THAT(losses, ::testing::Each(losses[0]));
    return losses[0];
  }
};

TEST_F(GptTest, AllShardingOptionsHaveTheSameLosses) {
  for (const bool is_bfloat16 : {false, true}) {
    const auto losses_with = [&](FullyShardOptions sharding) {
      if (is_bfloat16) sharding.param_dtype = at::kBFloat16;
      return losses(2, small(sharding), 6);
    };
    const std::vector<double> expected = losses_with({.num_shards = 1});
    EXPECT_LT(expected[5], expected[0]);
    for (const bool reshards : {true, false}) {
      for (const size_t prefetch : {0, 2}) {
        EXPECT_EQ(losses_with({.reshard_after_forward = reshards,
                               .prefetch_depth = prefetch}),
                  expected)
            << reshards << ", prefetch " << prefetch;
      }
    }
  }
  EXPECT_EQ(losses(4, small({.reshard_after_forward = 2}), 4),
            losses(4, small(), 4));
}

TEST_F(GptTest, AResumedRunHasTheLossesOfAnUninterruptedRun) {
  const std::string folder = std::filesystem::path(::testing::TempDir()) /
                             ("gpt_test_" + std::to_string(getpid()));
  const std::vector<double> expected = losses(2, small(), 4);
  std::vector<double> found;
  run_ranks(2, [&](const Group& group) {
    Training training(group, corpus_, small());
    for (int64_t step = 0; step < 2; ++step) training.step(step);
    training.save(folder, 2);
  });
  run_ranks(2, [&](const Group& group) {
    Training training(group, corpus_, small());
    const int64_t first = training.resume(folder);
    EXPECT_EQ(first, 2);
    for (int64_t step = first; step < 4; ++step) {
      const double loss = training.step(step);
      if (group->getRank() == 0) found.push_back(loss);
    }
  });
  EXPECT_EQ(found, std::vector<double>(expected.begin() + 2, expected.end()));
  std::filesystem::remove_all(folder);
}

TEST_F(GptTest, SamplesOnRank0AndTrainsOn) {
  std::vector<std::string> samples(2);
  run_ranks(2, [&](const Group& group) {
    Training training(group, corpus_, small());
    training.step(0);
    samples[group->getRank()] = training.sample("CELIA\t", 30);
    training.step(1);
  });
  EXPECT_THAT(samples[0], StartsWith("CELIA\t"));
  EXPECT_EQ(samples[0].size(), 36u);
  EXPECT_EQ(samples[1], "");
}

TEST_F(GptTest, RanksShareOneBatch) {
  const TextBatch whole = corpus_.batch(/*seed=*/1, /*step=*/2, /*rank=*/0,
                                        /*batch_size=*/4, /*length=*/8);
  for (int rank = 0; rank < 2; ++rank) {
    const TextBatch part = corpus_.batch(1, 2, rank, 2, 8);
    EXPECT_TRUE(at::equal(part.inputs, whole.inputs.narrow(0, 2 * rank, 2)));
    EXPECT_TRUE(
        at::equal(part.targets.narrow(1, 0, 7), part.inputs.narrow(1, 1, 7)));
  }
  EXPECT_FALSE(at::equal(whole.inputs, corpus_.batch(1, 3, 0, 4, 8).inputs));
}

TEST_F(GptTest, AMissingFileAndAnUnknownCharacterAreErrors) {
  EXPECT_THROW(Corpus("/no/such/file"), c10::ValueError);
  EXPECT_THROW(corpus_.encode("\x01"), c10::ValueError);
}

}  // namespace
}  // namespace brigade::gpt
