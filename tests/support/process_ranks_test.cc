#include "brigade/tests/support/process_ranks.h"

#include <signal.h>

#include <cstdlib>
#include <iostream>
#include <stdexcept>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const RankFunction kEcho("echo", [](RankContext& rank) {
  std::cerr << rank.arguments().at(0) << " " << std::getenv("RANK") << "/"
            << std::getenv("WORLD_SIZE") << std::endl;
  rank.report("ready");
  rank.report("heard " + rank.await());
});

const RankFunction kFail("fail", [](RankContext& rank) {
  if (rank.rank() == 0) throw std::runtime_error("on purpose");
  std::_Exit(7);
});

const RankFunction kListen("listen", [](RankContext& rank) {
  rank.report("ready");
  rank.await();
});

TEST(ProcessRanksTest, CapturesOutputAndMessages) {
  ProcessRanks ranks(
      {.world_size = 2, .function = "echo", .arguments = {"one two"}});
  ranks.wait_for_all("ready");
  ranks.tell(0, "a");
  ranks.tell(1, "b");
  const auto results = ranks.finish();
  EXPECT_EQ(results[0].exit_code, 0);
  EXPECT_EQ(results[1].error_output, "one two 1/2\n");
  EXPECT_THAT(results[0].messages, ElementsAre("ready", "heard a"));
  EXPECT_THAT(results[1].messages, ElementsAre("ready", "heard b"));
}

TEST(ProcessRanksTest, TellsHowEachRankEnded) {
  ProcessRanks ranks({.world_size = 2, .function = "fail"});
  const auto results = ranks.finish();
  EXPECT_EQ(results[0].exit_code, 1);
  EXPECT_EQ(results[0].error_output, "rank 0: on purpose\n");
  EXPECT_EQ(results[1].exit_code, 7);
}

TEST(ProcessRanksTest, SignalsARank) {
  ProcessRanks ranks({.world_size = 2, .function = "listen"});
  ranks.wait_for_all("ready");
  ranks.signal(1, SIGKILL);
  ranks.tell(0, "go on");
  const auto results = ranks.finish();
  EXPECT_EQ(results[0].exit_code, 0);
  EXPECT_EQ(results[1].exit_code, std::nullopt);
  EXPECT_EQ(results[1].signal, SIGKILL);
}

TEST(ProcessRanksTest, KillsAtTheDeadlineWhatDoesNotEnd) {
  ProcessRanks ranks({.world_size = 1,
                      .function = "listen",
                      .deadline = std::chrono::milliseconds(200)});
  const auto results = ranks.finish();
  EXPECT_TRUE(results[0].timed_out);
  EXPECT_EQ(results[0].signal, SIGKILL);
}

TEST(ProcessRanksTest, SaysWhyAMessageWillNotCome) {
  ProcessRanks ranks({.world_size = 1, .function = "nosuch"});
  try {
    ranks.wait_for(0, "ready");
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(), HasSubstr("ended before it said 'ready'"));
    EXPECT_THAT(error.what(), HasSubstr("no rank function 'nosuch'"));
  }
}

}  // namespace
}  // namespace brigade::testing
