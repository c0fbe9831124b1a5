#include "brigade/comm/control/control_channel.h"

#include <torch/torch.h>

#include <barrier>
#include <chrono>
#include <latch>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "brigade/comm/control/status_check.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/comm/recording_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using enum StatusKind;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::StartsWith;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<c10d::Work>;

// Longer than a test may take: what ends sooner does not end by it.
constexpr std::chrono::milliseconds kNever = std::chrono::minutes(10);

Work launch(const Group& group, const at::Tensor& bucket) {
  std::vector<at::Tensor> tensors = {bucket};
  return group->allreduce(tensors);
}

std::vector<RankStatus> exchange(ControlChannel& channel,
                                 const RankStatus& own) {
  return channel.await(channel.exchange(own));
}

std::string difference(const std::vector<RankStatus>& by_rank) {
  return std::string(check_statuses(by_rank).message());
}

// The words of the PeerError that `fn` throws.
template <typename F>
std::string peer_error(F fn) {
  try {
    fn();
  } catch (const PeerError& error) {
    return error.what_without_backtrace();
  }
  return "no PeerError";
}

class ControlChannelTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ControlChannelTest,
                         ::testing::Values(1, 2, 3, 4));

TEST_P(ControlChannelTest, EveryRankGetsEveryRanksStatus) {
  run_ranks(GetParam(), [](Group group) {
    ControlChannel channel(group);
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

TEST_P(ControlChannelTest, ManyExchangesMayBeInFlight) {
  run_ranks(GetParam(), [](Group group) {
    ControlChannel channel(group);
    std::vector<PendingExchange> pending;
    for (int64_t i = 0; i < 30; ++i) {
      pending.push_back(channel.exchange({.iteration = i}));
    }
    for (int64_t i = 29; i >= 0; --i) {  // in any order
      for (const RankStatus& rank_status : channel.await(pending[i])) {
        EXPECT_EQ(rank_status.iteration, i);
      }
    }
  });
}

TEST_P(ControlChannelTest, ChannelsOfOneGroupAreApart) {
  run_ranks(GetParam(), [](Group group) {
    ControlChannel first(group);
    ControlChannel second(group);
    const PendingExchange one = first.exchange({.iteration = 1});
    const PendingExchange two = second.exchange({.iteration = 2});
    EXPECT_EQ(second.await(two).back().iteration, 2);
    EXPECT_EQ(first.await(one).back().iteration, 1);
  });
}

// What destruction closes must not take away what a peer has yet to read.
TEST_P(ControlChannelTest, EndsCleanlyRightAfterAnExchange) {
  run_ranks(
      GetParam(),
      [](Group group) {
        for (int i = 0; i < 50; ++i) {
          ControlChannel channel(group);
          EXPECT_EQ(exchange(channel, {.iteration = i}).size(),
                    static_cast<size_t>(group->getSize()));
        }
      },
      kNever);
}

TEST(ControlChannelTest, DoesNotWaitForALateRankUntilAskedTo) {
  std::latch first_has_sent(1);
  run_ranks(2, [&](Group group) {
    ControlChannel channel(group);
    if (group->getRank() == 1) first_has_sent.wait();
    const PendingExchange pending = channel.exchange({.iteration = 7});
    if (group->getRank() == 0) first_has_sent.count_down();
    EXPECT_EQ(channel.await(pending)[1].iteration, 7);
  });
}

TEST(ControlChannelTest, RanksOutOfStepReadTheSameAndGoOn) {
  std::vector<std::string> texts(3);
  run_ranks(3, [&](Group group) {
    const int rank = group->getRank();
    ControlChannel channel(group);
    texts[rank] = difference(
        exchange(channel, {.kind = rank == 2 ? kIdle : kEnd, .iteration = 7}));
    EXPECT_TRUE(
        check_statuses(exchange(channel, {.kind = kEnd, .iteration = 8})).ok());
  });
  EXPECT_THAT(texts[0], HasSubstr("rank 2 ran no backward in iteration 7"));
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

TEST(ControlChannelTest, ARankThatLeavesIsNamedAtOnce) {
  run_ranks(
      3,
      [](Group group) {
        auto channel = std::make_unique<ControlChannel>(group);
        exchange(*channel, {.kind = kEnd, .iteration = 7});
        if (group->getRank() == 1) {
          channel = nullptr;
        } else {
          const std::string error = peer_error(
              [&] { exchange(*channel, {.kind = kEnd, .iteration = 8}); });
          EXPECT_THAT(
              error,
              StartsWith("waiting for the other ranks' statuses on rank " +
                         std::to_string(group->getRank()) +
                         ", which ended iteration 8: rank 1 "
                         "has left after iteration 7: "));
          // Of no use any more, and says so without another wait.
          EXPECT_EQ(peer_error([&] { channel->exchange({}); }), error);
        }
        // The group's own collectives go on.
        const at::Tensor tensor = at::ones(4);
        launch(group, tensor)->wait();
        EXPECT_TRUE(tensor.equal(at::full(4, 3.0)));
      },
      kNever);
}

TEST(ControlChannelTest, DestructionDoesNotWaitForExchangesInFlight) {
  std::latch destroyed(1);
  run_ranks(
      2,
      [&](Group group) {
        auto channel = std::make_unique<ControlChannel>(group);
        if (group->getRank() == 0) {
          PendingExchange one = channel->exchange({.iteration = 3});
          PendingExchange two = channel->exchange({.iteration = 4});
          channel = nullptr;
          EXPECT_ANY_THROW(one.exchange->wait(kNever));
          EXPECT_ANY_THROW(two.exchange->wait(kNever));
          destroyed.count_down();
        } else {
          destroyed.wait();
          EXPECT_EQ(exchange(*channel, {})[0].iteration, 3);  // was sent
          EXPECT_EQ(exchange(*channel, {})[0].iteration, 4);
          EXPECT_THAT(peer_error([&] { exchange(*channel, {}); }),
                      HasSubstr("rank 0 has left after iteration 4"));
        }
      },
      kNever);
}

TEST(ControlChannelTest, ARankThatNeverComesIsNamedAtTheTimeout) {
  std::latch over(1);
  run_ranks(
      2,
      [&](Group group) {
        ControlChannel channel(group);
        if (group->getRank() == 1) {
          over.wait();
          return;
        }
        EXPECT_THAT(
            peer_error([&] { exchange(channel, {.iteration = 7}); }),
            AllOf(HasSubstr("rank 0, which ran no backward in iteration 7"),
                  HasSubstr("rank 0 answered a liveness probe, rank 1 did not "
                            "within 3 s.")));
        over.count_down();
      },
      std::chrono::milliseconds(1500));
}

TEST(ControlChannelTest, RanksThatDoNotMeetAreAnError) {
  std::latch over(1);
  run_ranks(
      2,
      [&](Group group) {
        if (group->getRank() == 1) return over.wait();
        EXPECT_THAT(peer_error([&] { ControlChannel channel(group); }),
                    StartsWith("control channel: rank 0 of 2 could not "
                               "connect to the others: "));
        over.count_down();
      },
      std::chrono::milliseconds(1500));
}

TEST(ControlChannelTest, TakesTheMemoryOfEarlierExchangesAgain) {
  run_ranks(2, [](Group group) {
    ControlChannel channel(group);
    std::set<const void*> used;
    for (int i = 0; i < 100; ++i) {
      const PendingExchange pending = channel.exchange({.iteration = i});
      used.insert(pending.exchange.get());
      EXPECT_EQ(channel.await(pending)[1].iteration, i);
    }
    EXPECT_LE(used.size(), 3);
  });
}

// Two models in one process: their backwards may end in any order.
TEST(ControlChannelTest, ChannelsMayBeAwaitedInAnyOrderOnEachRank) {
  run_ranks(2, [](Group group) {
    ControlChannel first(group);
    ControlChannel second(group);
    for (int i = 0; i < 20; ++i) {
      const PendingExchange one = first.exchange({.iteration = i});
      const PendingExchange two = second.exchange({.iteration = -i});
      const auto await_first = [&] {
        EXPECT_EQ(first.await(one).back().iteration, i);
      };
      if (group->getRank() == 0) await_first();
      EXPECT_EQ(second.await(two).back().iteration, -i);
      if (group->getRank() == 1) await_first();
    }
  });
}

TEST(ControlChannelTest, OneThatLeavesLeavesTheOthersOfItsGroup) {
  run_ranks(2, [](Group group) {
    auto first = std::make_unique<ControlChannel>(group);
    ControlChannel second(group);
    if (group->getRank() == 0) {
      first = nullptr;
    } else {
      EXPECT_THAT(peer_error([&] { exchange(*first, {.iteration = 3}); }),
                  HasSubstr("rank 0 has left after iteration 0"));
    }
    EXPECT_EQ(exchange(second, {.iteration = 7}).back().iteration, 7);
  });
}

TEST(ControlChannelTest, ChannelsOfOneGroupShareTheirConnections) {
  run_ranks(2, [](Group group) {
    const std::shared_ptr<StatusMesh> mesh = StatusMesh::of(group);
    const ControlChannel first(group);
    const ControlChannel second(group);
    EXPECT_EQ(StatusMesh::of(group), mesh);
  });
}

// When a reducer ends is each rank's own business.
TEST(ControlChannelTest, RanksMeetWhetherTheirEarlierChannelsLiveOrNot) {
  run_ranks(2, [](Group group) {
    auto first = std::make_unique<ControlChannel>(group);
    exchange(*first, {});
    if (group->getRank() == 0) first = nullptr;
    ControlChannel second(group);
    EXPECT_EQ(exchange(second, {.iteration = 7})[1].iteration, 7);
  });
}

TEST(ControlChannelTest, AGroupWithoutStoreAnswersItself) {
  ControlChannel channel(c10::make_intrusive<c10d::ProcessGroup>(1, 3));
  const PendingExchange pending = channel.exchange({.iteration = 7});
  const auto by_rank = channel.await(pending);
  EXPECT_EQ(by_rank.size(), 3);
  EXPECT_TRUE(check_statuses(by_rank).ok());
}

TEST(RecordedStatusesTest, AreSeenWithTheCollectiveThatFollows) {
  RecordingGroup recording(2);
  ControlChannel channel(recording.group());
  launch(recording.group(), at::ones(1));
  exchange(channel, {.kind = kBegin, .iteration = 7});
  exchange(channel, {.kind = kEnd, .iteration = 7});
  launch(recording.group(), at::ones(4));
  launch(recording.group(), at::ones(5));
  EXPECT_THAT(recording.statuses(),
              ElementsAre("began iteration 7", "ended iteration 7"));
  EXPECT_EQ(recording.log()[0].rank_status, std::nullopt);
  EXPECT_EQ(recording.log()[1].rank_status, "ended iteration 7");
  EXPECT_EQ(recording.log()[2].rank_status, std::nullopt);
}

TEST(RecordedStatusesTest, AreAnsweredAsTheTestSays) {
  RecordingGroup recording(2);
  ControlChannel channel(recording.group());
  EXPECT_TRUE(check_statuses(exchange(channel, {})).ok());
  recording.answer_statuses_with([](RankStatus own) {
    RankStatus peer = own;
    peer.kind = kFailed;
    return std::vector<RankStatus>{own, peer};
  });
  EXPECT_EQ(difference(exchange(channel, {.iteration = 7})),
            "rank 1 failed in iteration 7");
  recording.answer_statuses_with(
      [](RankStatus own) { return std::vector<RankStatus>{own}; });
  EXPECT_THROW(channel.exchange({}), c10::ValueError);
}

}  // namespace
}  // namespace brigade
