// Status channels of processes that die, fork and exit.

#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/control/control_channel.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
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
  ControlChannel channel(scope.group());
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

class ControlChannelFailureTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ControlChannelFailureTest,
                         ::testing::Values(2, 3));

// The timeout is 30 minutes: only the closed connection ends this in time.
TEST_P(ControlChannelFailureTest, SurvivorsSayWhichRankIsMissing) {
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
                       std::to_string(rank) + ", which ran no backward in "),
            ContainsRegex(
                "ranks? 0(, 2)? answered a liveness probe, rank 1 did "
                "not: its connection is closed\\."))));
  }
}

// Of six ranks, rank 4 has no connection to rank 1.
TEST(ControlChannelFailureTest, RanksThatWereNotConnectedSayTheSame) {
  ProcessRanks ranks({.world_size = 6, .function = "exchange_forever"});
  ranks.wait_for_all("running");
  ranks.signal(1, SIGKILL);
  const std::vector<RankResult> results = ranks.finish();
  for (const int rank : {0, 2, 3, 4, 5}) {
    EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
    EXPECT_THAT(results[rank].messages,
                Contains(AllOf(
                    StartsWith("error waiting for the other ranks'"),
                    HasSubstr("ranks 0, 2-5 answered a liveness probe, rank 1 "
                              "did not: its connection is closed."))));
  }
}

// Both are stopped before one dies, so that neither answers for the other.
TEST(ControlChannelFailureTest, SeveralThatDieTogetherAreAllNamed) {
  ProcessRanks ranks({.world_size = 4, .function = "exchange_forever"});
  ranks.wait_for_all("running");
  for (const int signal : {SIGSTOP, SIGKILL}) {
    for (const int rank : {1, 2}) ranks.signal(rank, signal);
  }
  const std::vector<RankResult> results = ranks.finish();
  for (const int rank : {0, 3}) {
    EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
    EXPECT_THAT(results[rank].messages,
                Contains(HasSubstr(
                    "ranks 0, 3 answered a liveness probe, ranks 1, 2 did "
                    "not: their connections are closed.")));
  }
}

// What a forked child makes of its parent's channel.
std::string use_after_fork(std::unique_ptr<ControlChannel> channel) {
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
  auto channel = std::make_unique<ControlChannel>(scope.group());
  channel->await(channel->exchange({}));
  const PendingExchange in_flight = channel->exchange({});
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
  rank.report("parent goes on");
});

TEST(ControlChannelFailureTest, AForkedChildIsRefusedAndTheParentGoesOn) {
  ProcessRanks ranks({.world_size = 2, .function = "fork_with_channel"});
  for (const RankResult& result : ranks.finish()) {
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    EXPECT_THAT(result.messages, ElementsAre("child 0", "parent goes on"));
  }
}

class StoreOfNobody final : public c10d::HashStore {
 public:
  int64_t add(const std::string&, int64_t) override {
    throw std::runtime_error("nobody is here");
  }
};

// Of a group without a backend, which a child may let go of.
const RankFunction kForkWithGroup("fork_with_group", [](RankContext& rank) {
  GroupScope scope(init_process_group());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(
      scope.group()->getStore(), rank.rank(), 2);
  {
    ControlChannel channel(group);
    channel.await(channel.exchange({}));
  }
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::string error = "no error";
    try {
      ControlChannel refused(group);
    } catch (const c10::Error& e) {
      error = e.what_without_backtrace();
    }
    group.reset();
    try {
      // Looks through the groups that are gone.
      ControlChannel(c10::make_intrusive<c10d::ProcessGroup>(
          c10::make_intrusive<StoreOfNobody>(), 0, 2));
    } catch (const std::exception&) {
    }
    _exit(error.find("was forked") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  rank.report("child " + std::to_string(status));
  ControlChannel channel(group);
  channel.await(channel.exchange({}));
  rank.report("parent goes on");
});

TEST(ControlChannelFailureTest, AForkedChildCantEndItsParentsConnections) {
  ProcessRanks ranks({.world_size = 2, .function = "fork_with_group"});
  for (const RankResult& result : ranks.finish()) {
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    EXPECT_THAT(result.messages, ElementsAre("child 0", "parent goes on"));
  }
}

// The transport's thread is not always done with an exchange that has just been
// awaited; a child in which it was not has nobody to wait for.
const RankFunction kForkOften("fork_after_exchanges", [](RankContext& rank) {
  GroupScope scope(init_process_group());
  auto channel = std::make_unique<ControlChannel>(scope.group());
  int ended = 0;
  for (int i = 0; i < 60; ++i) {
    channel->await(channel->exchange({.iteration = i}));
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      channel = nullptr;
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (WIFEXITED(status)) ++ended;
  }
  rank.report(std::to_string(ended) + " children have ended");
});

TEST(ControlChannelFailureTest, AForkedChildWaitsForNoThreadOfItsParent) {
  ProcessRanks ranks({.world_size = 2, .function = "fork_after_exchanges"});
  for (const RankResult& result : ranks.finish()) {
    EXPECT_EQ(result.exit_code, 0) << result.error_output;
    EXPECT_THAT(result.messages, ElementsAre("60 children have ended"));
  }
}

// Tells the others when it goes.
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
    static ControlChannel channel(group);
    channel.await(channel.exchange({.iteration = 5}));
    channel.exchange({.iteration = 6});
    std::exit(0);
  }
  ControlChannel channel(group);
  channel.await(channel.exchange({.iteration = 5}));
  group->getStore()->wait({"farewell"});
  try {
    channel.await(channel.exchange({.iteration = 6}));  // may have been sent
    channel.await(channel.exchange({.iteration = 7}));
  } catch (const PeerError& error) {
    rank.report(error.what_without_backtrace());
  }
});

TEST(ControlChannelFailureTest,
     AProcessThatExitsWithAnExchangeInFlightHasLeft) {
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
