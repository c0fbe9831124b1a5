// Status channels of processes that are killed, fork or exit.

#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/status/status_channel.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using ::testing::StartsWith;

const RankFunction kExchangeForever("exchange_forever", [](RankContext& rank) {
  GroupScope scope(init_process_group());
  StatusChannel channel(scope.group());
  for (int64_t iteration = 0;; ++iteration) {
    try {
      channel.await(channel.exchange({.iteration = iteration}));
    } catch (const PeerError& error) {
      rank.report(std::string("error ") + error.what_without_backtrace());
      return;
    }
    if (iteration == 0) rank.report("running");
  }
});

class StatusFailureTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, StatusFailureTest,
                         ::testing::Values(2, 3));

// The timeout is 30 minutes: only the check of the process ends this in time.
TEST_P(StatusFailureTest, SurvivorsNameTheDeadRank) {
  ProcessRanks ranks(
      {.world_size = GetParam(), .function = "exchange_forever"});
  ranks.wait_for_all("running");
  ranks.signal(1, SIGKILL);
  const std::vector<RankResult> results = ranks.finish();
  for (int rank = 0; rank < GetParam(); ++rank) {
    if (rank == 1) continue;
    EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
    EXPECT_THAT(
        results[rank].messages,
        Contains(AllOf(
            StartsWith("error waiting for the other ranks' statuses on rank " +
                       std::to_string(rank) + ", which began iteration "),
            ContainsRegex("rank 1 \\(process [0-9]+\\) has ended"))));
  }
}

TEST(StatusFailureTest, NamesOneOfSeveralDeadRanks) {
  ProcessRanks ranks({.world_size = 4, .function = "exchange_forever"});
  ranks.wait_for_all("running");
  for (const int signal : {SIGSTOP, SIGKILL}) {
    for (const int rank : {1, 2}) ranks.signal(rank, signal);
  }
  const std::vector<RankResult> results = ranks.finish();
  for (const int rank : {0, 3}) {
    EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
    EXPECT_THAT(
        results[rank].messages,
        Contains(ContainsRegex("rank [12] \\(process [0-9]+\\) has ended")));
  }
}

// Returns the error of a forked child that uses its parent's channel.
std::string use_after_fork(std::unique_ptr<StatusChannel> channel) {
  std::string error = "no error";
  try {
    channel->exchange({});
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
  }
  channel = nullptr;
  return error;
}

const RankFunction kFork("fork_with_channel", [](RankContext& rank) {
  GroupScope scope(init_process_group());
  auto channel = std::make_unique<StatusChannel>(scope.group());
  channel->await(channel->exchange({}));
  const RankStatus in_flight = channel->exchange({});
  const pid_t child = fork();
  if (child == 0) {
    const bool refused =
        use_after_fork(std::move(channel)).find("was forked") !=
        std::string::npos;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  rank.report("child " + std::to_string(WEXITSTATUS(status)));
  channel->await(in_flight);
  channel->await(channel->exchange({}));
  rank.report("parent continues");
});

TEST(StatusFailureTest, RejectsAForkedChildAndTheParentContinues) {
  ProcessRanks ranks({.world_size = 2, .function = "fork_with_channel"});
  for (const RankResult& result : ranks.finish()) {
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    EXPECT_THAT(result.messages, ElementsAre("child 0", "parent continues"));
  }
}

// Sets a key in the store when it is destroyed.
struct Farewell {
  explicit Farewell(c10::intrusive_ptr<c10d::Store> store)
      : store(std::move(store)) {}
  ~Farewell() { store->set("farewell", "said"); }
  c10::intrusive_ptr<c10d::Store> store;
};

const RankFunction kExit("exit_with_channel", [](RankContext& rank) {
  static const auto group = init_process_group();
  if (rank.rank() == 0) {
    static const Farewell after_the_channel(group->getStore());
    static StatusChannel channel(group);
    channel.await(channel.exchange({.iteration = 5}));
    channel.exchange({.iteration = 6});
    std::exit(0);
  }
  StatusChannel channel(group);
  channel.await(channel.exchange({.iteration = 5}));
  group->getStore()->wait({"farewell"});
  try {
    channel.await(channel.exchange({.iteration = 6}));  // may have been sent
    channel.await(channel.exchange({.iteration = 7}));
  } catch (const PeerError& error) {
    rank.report(error.what_without_backtrace());
  }
});

TEST(StatusFailureTest, NamesAProcessThatExitsWithAnExchangeInFlight) {
  ProcessRanks ranks({.world_size = 2, .function = "exit_with_channel"});
  const std::vector<RankResult> results = ranks.finish();
  EXPECT_EQ(results[0].exit_code, 0) << results[0].error_output;
  EXPECT_EQ(results[0].error_output, "");
  EXPECT_EQ(results[1].exit_code, 0) << results[1].error_output;
  EXPECT_THAT(results[1].messages,
              ElementsAre(HasSubstr("rank 0 has left after iteration 6")));
}

}  // namespace
}  // namespace brigade
