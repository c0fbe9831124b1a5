// Rank processes that die or stop during training.

#include <signal.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using ::testing::StartsWith;
using testing::step;
using testing::ToyModel;

// Trains until a peer fails, then saves the parameters. Argument: the group's
// timeout in ms.
const RankFunction kTrainForever("train_forever", [](RankContext& rank) {
  const std::chrono::milliseconds timeout(std::stoll(rank.arguments().at(0)));
  GroupScope scope(init_process_group({.timeout = timeout}));
  const ToyModel model({{1000, 1000}, {1000, 1000}});
  Reducer reducer(model.parameters, scope.group(),
                  {.bucket_plan = {{1}, {0}}, .parameter_names = model.names});
  for (int s = 0;; ++s) {
    model.zero_grad();
    const at::Tensor loss = model.loss(rank.rank());
    try {
      step(reducer, loss);
    } catch (const c10::DistBackendError& error) {
      std::string text = error.what_without_backtrace();
      std::replace(text.begin(), text.end(), '\n', ' ');
      rank.report("error " + text);
      std::ostringstream file;
      torch::save(model.parameters, file);
      rank.report("saved " + std::to_string(file.str().size() > 8'000'000));
      return;
    }
    if (s == 2) rank.report("training");
  }
});

class ProcessFailureTest : public ::testing::TestWithParam<int> {
 protected:
  void expect_error_on_survivors(int victim,
                                 const std::vector<RankResult>& results) {
    for (size_t rank = 0; rank < results.size(); ++rank) {
      if (static_cast<int>(rank) == victim) continue;
      EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
      EXPECT_THAT(
          results[rank].messages,
          Contains(AllOf(
              StartsWith("error Reducer: "),
              ContainsRegex("bucket [01] of 2 \\("),
              ContainsRegex("in iteration [0-9]+ on rank " +
                            std::to_string(rank)),
              ContainsRegex("ranks? .*" + std::to_string(victim) +
                            "( did not| \\(process [0-9]+\\) has ended)"))));
      EXPECT_THAT(results[rank].messages, Contains("saved 1"));
    }
  }
};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ProcessFailureTest,
                         ::testing::Values(2, 3));

TEST_P(ProcessFailureTest, SurvivorsOfAKilledPeerNameBucketAndRankAndSave) {
  const int victim = GetParam() - 1;
  ProcessRanks ranks({.world_size = GetParam(),
                      .function = "train_forever",
                      .arguments = {"600000"}});
  ranks.wait_for_all("training");
  ranks.signal(victim, SIGKILL);
  expect_error_on_survivors(victim, ranks.finish());
}

TEST_P(ProcessFailureTest, PeersOfAStoppedRankFailAtTheTimeout) {
  const int victim = 0;
  ProcessRanks ranks({.world_size = GetParam(),
                      .function = "train_forever",
                      .arguments = {"3000"}});
  ranks.wait_for_all("training");
  ranks.signal(victim, SIGSTOP);
  for (int rank = 1; rank < GetParam(); ++rank) {
    ranks.wait_for(rank, "saved 1");
  }
  ranks.signal(victim, SIGKILL);
  expect_error_on_survivors(victim, ranks.finish());
}

}  // namespace
}  // namespace brigade
