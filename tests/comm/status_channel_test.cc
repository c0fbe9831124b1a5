#include "brigade/comm/status/status_channel.h"

#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using enum StatusKind;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using testing::run_ranks;
using ::testing::StartsWith;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Longer than any test: never the reason for an end.
constexpr std::chrono::milliseconds kNever = std::chrono::minutes(10);

Work launch(const Group& group, const at::Tensor& bucket) {
  std::vector<at::Tensor> tensors = {bucket};
  return group->allreduce(tensors);
}

std::vector<RankStatus> exchange(StatusChannel& channel,
                                 const RankStatus& own) {
  return channel.await(channel.exchange(own));
}

// Returns the text of the PeerError that `fn` throws.
template <typename F>
std::string peer_error(F fn) {
  try {
    fn();
  } catch (const PeerError& error) {
    return error.what_without_backtrace();
  }
  return "no PeerError";
}

class StatusChannelTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, StatusChannelTest,
                         ::testing::Values(1, 2, 3, 4));

TEST_P(StatusChannelTest, EveryRankGetsEveryRanksStatus) {
  run_ranks(GetParam(), [](Group group) {
    StatusChannel channel(group);
    for (int64_t i = 1; i <= 20; ++i) {
      const auto by_rank = exchange(
          channel, {.kind = kBegin,
                    .iteration = 100 * i + group->getRank(),
                    .unit = -group->getRank(),
                    .text = status_text(std::to_string(group->getRank()))});
      ASSERT_EQ(by_rank.size(), static_cast<size_t>(group->getSize()));
      for (int rank = 0; rank < group->getSize(); ++rank) {
        EXPECT_EQ(by_rank[rank].kind, kBegin);
        EXPECT_EQ(by_rank[rank].sequence, i);
        EXPECT_EQ(by_rank[rank].iteration, 100 * i + rank);
        EXPECT_EQ(by_rank[rank].unit, -rank);
        EXPECT_EQ(words_of(by_rank[rank].text), std::to_string(rank));
      }
    }
  });
}

// A peer may read the last statuses after this rank has destroyed its channel.
TEST_P(StatusChannelTest, EndsCleanlyRightAfterAnExchange) {
  run_ranks(
      GetParam(),
      [](Group group) {
        for (int i = 0; i < 50; ++i) {
          StatusChannel channel(group);
          EXPECT_EQ(exchange(channel, {.iteration = i}).size(),
                    static_cast<size_t>(group->getSize()));
        }
      },
      kNever);
}

TEST(StatusChannelTest, NamesARankThatLeavesAtOnce) {
  run_ranks(
      3,
      [](Group group) {
        auto channel = std::make_unique<StatusChannel>(group);
        exchange(*channel, {.kind = kEnd, .iteration = 7});
        if (group->getRank() == 1) {
          channel = nullptr;
        } else {
          const std::string error = peer_error(
              [&] { exchange(*channel, {.kind = kEnd, .iteration = 8}); });
          EXPECT_THAT(
              error,
              AllOf(
                  StartsWith("rank 1 destroyed its model after iteration 7.\n"),
                  EndsWith("\nRank " + std::to_string(group->getRank()) +
                           ", which ended iteration 8, waited for the other "
                           "ranks' statuses.")));
          // Later calls throw the same error without another wait.
          EXPECT_EQ(peer_error([&] { channel->exchange({}); }), error);
        }
        // The group's own collectives still work.
        const at::Tensor tensor = at::ones(4);
        launch(group, tensor)->wait();
        EXPECT_TRUE(tensor.equal(at::full(4, 3.0)));
      },
      kNever);
}

TEST(StatusChannelTest, NamesAMissingRankAtTheTimeout) {
  std::latch over(1);
  run_ranks(
      2,
      [&](Group group) {
        StatusChannel channel(group);
        if (group->getRank() == 1) {
          over.wait();
          return;
        }
        EXPECT_THAT(
            peer_error([&] { exchange(channel, {.iteration = 7}); }),
            AllOf(StartsWith("rank 1 did not respond within 1.5 s.\n"),
                  HasSubstr("Rank 0, which began iteration 7"),
                  HasSubstr("rank 0 answered a liveness probe, rank 1 did not "
                            "within 1.0 s.")));
        over.count_down();
      },
      std::chrono::milliseconds(1500));
}

TEST(StatusChannelTest, ThrowsIfARankDoesNotConnect) {
  std::latch over(1);
  run_ranks(
      2,
      [&](Group group) {
        if (group->getRank() == 1) return over.wait();
        EXPECT_THAT(peer_error([&] { StatusChannel channel(group); }),
                    StartsWith("rank 0 of 2 could not exchange host ids: "));
        over.count_down();
      },
      std::chrono::milliseconds(1500));
}

// Backwards of two models in one process may end in any order.
TEST(StatusChannelTest, ChannelsMayBeAwaitedInAnyOrderOnEachRank) {
  run_ranks(2, [](Group group) {
    StatusChannel first(group);
    StatusChannel second(group);
    for (int i = 0; i < 20; ++i) {
      const RankStatus one = first.exchange({.iteration = i});
      const RankStatus two = second.exchange({.iteration = -i});
      const auto await_first = [&] {
        EXPECT_EQ(first.await(one).back().iteration, i);
      };
      if (group->getRank() == 0) await_first();
      EXPECT_EQ(second.await(two).back().iteration, -i);
      if (group->getRank() == 1) await_first();
    }
  });
}

TEST(StatusChannelTest, DestroyingOneChannelKeepsTheOthersOfItsGroup) {
  run_ranks(2, [](Group group) {
    auto first = std::make_unique<StatusChannel>(group);
    StatusChannel second(group);
    if (group->getRank() == 0) {
      first = nullptr;
    } else {
      EXPECT_THAT(peer_error([&] { exchange(*first, {.iteration = 3}); }),
                  HasSubstr("rank 0 destroyed its model after iteration 0"));
    }
    EXPECT_EQ(exchange(second, {.iteration = 7}).back().iteration, 7);
  });
}

TEST(StatusChannelTest, WithoutAStoreReturnsItsOwnStatus) {
  StatusChannel channel(c10::make_intrusive<c10d::ProcessGroup>(1, 3));
  const RankStatus pending = channel.exchange({.iteration = 7});
  const auto by_rank = channel.await(pending);
  EXPECT_EQ(by_rank.size(), 3);
  EXPECT_TRUE(check_statuses(by_rank).ok());
}

struct Transport {
  const char* name;
  std::function<std::unique_ptr<StatusTransport>(const Group&)> make;
};

class StatusTransportTest : public ::testing::TestWithParam<Transport> {};
INSTANTIATE_TEST_SUITE_P(
    Transports, StatusTransportTest,
    ::testing::Values(Transport{"Shared", make_shared_status_transport},
                      Transport{"Gathering", make_gathering_status_transport}),
    [](const auto& info) { return info.param.name; });

StatusTransport::Deadline soon() {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
}
StatusTransport::Deadline late() {
  return std::chrono::steady_clock::now() + kNever;
}

TEST_P(StatusTransportTest, DeliversEachExchangeToAllRanks) {
  run_ranks(3, [](const Group& group) {
    const auto transport = GetParam().make(group);
    // More than the ring in shared memory holds.
    for (int64_t i = 1; i <= 3 * kMaxStatusesInFlight; ++i) {
      transport->send({.sequence = i, .iteration = 100 * i + group->getRank()});
      const auto by_rank = transport->receive(i, late());
      ASSERT_TRUE(by_rank);
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ((*by_rank)[rank].iteration, 100 * i + rank);
      }
    }
    group->barrier()->wait();
  });
}

TEST_P(StatusTransportTest, TheMaximumMayBeInFlight) {
  run_ranks(2, [](const Group& group) {
    const auto transport = GetParam().make(group);
    int64_t received = 0;
    for (int64_t i = 1; i <= 4 * kMaxStatusesInFlight; ++i) {
      transport->send({.sequence = i, .iteration = i + group->getRank()});
      // Rank 0 lags by the maximum, rank 1 keeps up.
      const int64_t lag = group->getRank() == 0 ? kMaxStatusesInFlight : 1;
      if (i - received < lag) continue;
      const auto by_rank = transport->receive(++received, late());
      ASSERT_TRUE(by_rank);
      EXPECT_EQ((*by_rank)[1].iteration, received + 1);
    }
    while (received < 4 * kMaxStatusesInFlight) {
      EXPECT_EQ((*transport->receive(received + 1, late()))[0].iteration,
                received + 1);
      ++received;
    }
    group->barrier()->wait();
  });
}

TEST_P(StatusTransportTest, ReturnsNulloptAtTheDeadline) {
  std::latch is_over(1);
  run_ranks(2, [&](const Group& group) {
    const auto transport = GetParam().make(group);
    if (group->getRank() == 1) is_over.wait();
    transport->send({.sequence = 1});
    if (group->getRank() == 0) {
      EXPECT_FALSE(transport->is_complete(1));
      EXPECT_FALSE(transport->receive(1, soon()));
      is_over.count_down();
    }
    EXPECT_TRUE(transport->receive(1, late()));
    group->barrier()->wait();
  });
}

TEST_P(StatusTransportTest, AbortEndsTheWaitsOfOtherRanks) {
  run_ranks(3, [](const Group& group) {
    const auto transport = GetParam().make(group);
    const RankStatus own = {.sequence = 1, .iteration = 7};
    if (group->getRank() == 0) {
      transport->abort(own);
    } else {
      transport->send(own);
      EXPECT_THROW(transport->receive(1, late()), std::exception);
    }
    group->barrier()->wait();  // the group's own collectives still work
  });
}

// ---- Processes that are killed, fork or exit

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
    EXPECT_THAT(results[rank].messages,
                AllOf(Contains(ContainsRegex(
                          "^error rank 1 \\(process [0-9]+\\) has ended")),
                      Contains(HasSubstr("Rank " + std::to_string(rank) +
                                         ", which began iteration "))));
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
  EXPECT_THAT(
      results[1].messages,
      Contains(HasSubstr("rank 0 destroyed its model after iteration 6")));
}

}  // namespace
}  // namespace brigade
