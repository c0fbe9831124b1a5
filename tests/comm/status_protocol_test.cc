// The protocol among ranks whose messages this test holds, and delivers in any
// order that connections allow.

#include "brigade/comm/control/status_protocol.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/control/exchange_rounds.h"
#include "brigade/tests/comm/world_sizes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using enum StatusKind;
using enum StatusExchange::Outcome;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::IsSubsetOf;
using ::testing::Not;

using Outcome = StatusExchange::Outcome;
using ExchangePtr = std::shared_ptr<StatusExchange>;

constexpr uint64_t kChannel = 2;

class Ranks {
 public:
  explicit Ranks(int size, unsigned seed = 0) : size_(size), random_(seed) {
    for (int rank = 0; rank < size; ++rank) {
      num_sent_.push_back(0);
      protocols_.push_back(std::make_unique<StatusProtocol>(
          rank, size, [this, rank](int peer, Bytes message) {
            ++num_sent_[rank];
            wires_[{rank, peer}].emplace_back(message.begin(), message.end());
          }));
    }
  }

  int size() const { return size_; }
  std::mt19937& random() { return random_; }

  ExchangePtr begin(int rank, RankStatus own, uint64_t channel = kChannel) {
    return protocols_[rank]->begin(channel, own);
  }

  std::vector<ExchangePtr> begin_all(const RankStatus& own) {
    std::vector<ExchangePtr> exchanges;
    for (int rank = 0; rank < size_; ++rank) {
      exchanges.push_back(begin(rank, own));
    }
    return exchanges;
  }

  StatusProtocol& operator[](int rank) { return *protocols_[rank]; }

  // Its connections are closed; what it has sent may still arrive, but of each
  // connection only the first so many messages do.
  void kill(int rank, size_t num_arriving = 1000) {
    dead_.insert(rank);
    for (const int peer : neighbours_of(rank, size_)) {
      Wire& wire = wires_[{rank, peer}];
      wire.resize(std::min(wire.size(), num_arriving));
      wire.push_back({});  // the end
      wires_[{peer, rank}].clear();
    }
  }
  bool is_dead(int rank) const { return dead_.contains(rank); }
  const std::set<int>& dead() const { return dead_; }

  // One message, of any connection. False: there is none.
  bool deliver_one() {
    std::vector<std::pair<int, int>> ready;
    for (const auto& [ends, wire] : wires_) {
      if (!wire.empty() && !dead_.contains(ends.second)) ready.push_back(ends);
    }
    if (ready.empty()) return false;
    const auto [from, to] = ready[random_() % ready.size()];
    Wire& wire = wires_[{from, to}];
    const std::vector<std::byte> message = std::move(wire.front());
    wire.pop_front();
    if (message.empty()) {
      protocols_[to]->on_closed(from);
    } else {
      protocols_[to]->on_message(from, message);
    }
    return true;
  }

  void deliver_all() {
    while (deliver_one()) {
    }
  }

  int num_sent(int rank) const { return num_sent_[rank]; }

 private:
  using Wire = std::deque<std::vector<std::byte>>;

  const int size_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<StatusProtocol>> protocols_;
  std::map<std::pair<int, int>, Wire> wires_;  // by sender and receiver
  std::set<int> dead_;
  std::vector<int> num_sent_;
};

Outcome outcome_of(const ExchangePtr& exchange) {
  const Outcome outcome =
      exchange->wait_for_outcome(std::chrono::milliseconds(0));
  return outcome == kTimedOut ? kPending : outcome;
}

std::vector<Outcome> outcomes_of(const std::vector<ExchangePtr>& exchanges) {
  std::vector<Outcome> outcomes;
  for (const ExchangePtr& each : exchanges)
    outcomes.push_back(outcome_of(each));
  return outcomes;
}

std::vector<int> absent_ranks(const ExchangePtr& exchange) {
  std::vector<int> ranks;
  for (const Absence& absence : exchange->absences()) {
    ranks.push_back(absence.rank);
  }
  return ranks;
}

class StatusProtocolTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, StatusProtocolTest,
                         ::testing::ValuesIn(testing::world_sizes()));

TEST_P(StatusProtocolTest, EqualStatusesTakeOneMessageARound) {
  Ranks ranks(GetParam());
  for (int64_t i = 1; i <= 3; ++i) {
    const auto exchanges = ranks.begin_all({.kind = kEnd, .sequence = i});
    ranks.deliver_all();
    EXPECT_THAT(outcomes_of(exchanges), Each(kAgreed));
    for (int rank = 0; rank < ranks.size(); ++rank) {
      EXPECT_EQ(ranks.num_sent(rank), i * num_rounds(ranks.size()));
    }
  }
}

TEST_P(StatusProtocolTest, AnyDifferenceBringsEachToAll) {
  for (int odd = 0; odd < GetParam(); ++odd) {
    Ranks ranks(GetParam(), /*seed=*/odd);
    std::vector<ExchangePtr> exchanges;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      exchanges.push_back(ranks.begin(rank, {.kind = kEnd,
                                             .sequence = 1,
                                             .iteration = rank == odd,
                                             .fingerprint = uint64_t(rank)}));
    }
    ranks.deliver_all();
    EXPECT_THAT(outcomes_of(exchanges), Each(kDiffer));
    for (int rank = 0; rank < ranks.size(); ++rank) {
      EXPECT_EQ(ranks.num_sent(rank), 2 * num_rounds(ranks.size()) - 1);
      const auto& by_rank = exchanges[rank]->received();
      ASSERT_EQ(by_rank.size(), ranks.size());
      for (int of = 0; of < ranks.size(); ++of) {
        EXPECT_EQ(by_rank[of].iteration, of == odd);
        EXPECT_EQ(by_rank[of].fingerprint, of);
      }
    }
  }
}

TEST_P(StatusProtocolTest, NothingIsOverBeforeTheLastHasBegun) {
  for (int late = 0; late < GetParam(); ++late) {
    Ranks ranks(GetParam(), /*seed=*/late);
    std::vector<ExchangePtr> exchanges;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      if (rank == late) continue;
      exchanges.push_back(ranks.begin(rank, {.sequence = 1}));
    }
    ranks.deliver_all();
    EXPECT_THAT(outcomes_of(exchanges), Each(kPending));
    exchanges.push_back(ranks.begin(late, {.sequence = 1}));
    ranks.deliver_all();
    EXPECT_THAT(outcomes_of(exchanges), Each(kAgreed));
  }
}

TEST_P(StatusProtocolTest, ExchangesInFlightAndChannelsAreApart) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Ranks ranks(GetParam(), seed);
    std::map<std::pair<uint64_t, int64_t>, std::vector<ExchangePtr>> exchanges;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      for (int64_t i = 1; i <= 4; ++i) {
        for (const uint64_t channel : {1, 2}) {
          const bool differs = channel == 1 && i == 2;
          exchanges[{channel, i}].push_back(ranks.begin(
              rank, {.sequence = i, .iteration = differs ? rank : 10 * i},
              channel));
          if (ranks.random()() % 2 == 0) ranks.deliver_one();
        }
      }
    }
    ranks.deliver_all();
    for (const auto& [place, of_ranks] : exchanges) {
      const bool differs = place == std::pair<uint64_t, int64_t>(1, 2);
      EXPECT_THAT(outcomes_of(of_ranks), Each(differs ? kDiffer : kAgreed));
    }
  }
}

// Those that it was not connected to, too, and though most ranks are late.
TEST_P(StatusProtocolTest, ADeathIsKnownToAllThoughOthersAreLate) {
  for (int victim = 0; victim < GetParam(); ++victim) {
    // Some of many, others for each victim.
    const int stride = 1 + GetParam() / 8;
    for (int waiting = victim % stride; waiting < GetParam();
         waiting += stride) {
      if (waiting == victim) continue;
      Ranks ranks(GetParam());
      ranks.begin_all({.sequence = 1});
      ranks.deliver_all();
      const ExchangePtr exchange = ranks.begin(waiting, {.sequence = 2});
      ranks.kill(victim);
      ranks.deliver_all();
      ASSERT_EQ(outcome_of(exchange), kBroken);
      ASSERT_THAT(absent_ranks(exchange), ElementsAre(victim));
      EXPECT_EQ(exchange->absences()[0].reason, AbsenceReason::kClosed);
    }
  }
}

// Also while statuses are gathered; what it was sending last is cut off.
TEST_P(StatusProtocolTest, ADeathAtAnyTimeLeavesNobodyWaiting) {
  const int num_messages =
      GetParam() * (2 * num_rounds(GetParam()) - 1);  // if nobody died
  for (int step = 0; step <= num_messages; step += 1 + GetParam() / 8) {
    Ranks ranks(GetParam(), /*seed=*/step);
    const int victim = step % GetParam();
    std::vector<ExchangePtr> exchanges;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      exchanges.push_back(
          ranks.begin(rank, {.sequence = 1, .iteration = rank}));
    }
    for (int i = 0; i < step; ++i) ranks.deliver_one();
    ranks.kill(victim, /*num_arriving=*/step % 2);
    ranks.deliver_all();
    for (int rank = 0; rank < ranks.size(); ++rank) {
      if (rank == victim) continue;
      EXPECT_THAT(outcome_of(exchanges[rank]), AnyOf(kDiffer, kBroken));
      EXPECT_THAT(absent_ranks(exchanges[rank]), IsSubsetOf({victim}));
    }
  }
}

TEST_P(StatusProtocolTest, LaterExchangesFailAtOnceAfterADeath) {
  Ranks ranks(GetParam());
  ranks.begin_all({.sequence = 1});
  ranks.deliver_all();
  ranks.kill(0);
  ranks.deliver_all();
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const ExchangePtr exchange = ranks.begin(rank, {.sequence = 2});
    EXPECT_EQ(outcome_of(exchange), kBroken);
    EXPECT_THAT(absent_ranks(exchange), ElementsAre(0));
  }
}

TEST_P(StatusProtocolTest, WhatIsDoneIsNotBrokenByAnEnd) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Ranks ranks(GetParam(), seed);
    const auto exchanges = ranks.begin_all({.sequence = 1});
    const int first = static_cast<int>(ranks.random()() % ranks.size());
    while (outcome_of(exchanges[first]) == kPending) {
      ASSERT_TRUE(ranks.deliver_one());
    }
    ranks.kill(first);  // its end; what it has sent arrives
    ranks.deliver_all();
    EXPECT_THAT(outcomes_of(exchanges), Each(kAgreed));
  }
}

TEST_P(StatusProtocolTest, ARankThatLeavesEndsOnlyWhatComesLater) {
  for (int leaver = 0; leaver < GetParam(); ++leaver) {
    Ranks ranks(GetParam(), /*seed=*/leaver);
    std::vector<ExchangePtr> exchanges;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      exchanges.push_back(
          ranks.begin(rank, {.sequence = 1, .iteration = 7 + (rank == 1)}));
    }
    ranks[leaver].leave(kChannel, {.sequence = 1, .iteration = 7});
    std::vector<ExchangePtr> later;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      if (rank != leaver) later.push_back(ranks.begin(rank, {.sequence = 2}));
    }
    const auto other = [&] {
      std::vector<ExchangePtr> all;
      for (int rank = 0; rank < ranks.size(); ++rank) {
        all.push_back(ranks.begin(rank, {.sequence = 1}, /*channel=*/5));
      }
      return all;
    }();
    ranks.deliver_all();
    EXPECT_THAT(outcomes_of(exchanges), Each(kDiffer));
    EXPECT_THAT(outcomes_of(other), Each(kAgreed));
    for (const ExchangePtr& exchange : later) {
      ASSERT_EQ(outcome_of(exchange), kBroken);
      ASSERT_THAT(absent_ranks(exchange), ElementsAre(leaver));
      EXPECT_EQ(exchange->absences()[0].reason, AbsenceReason::kLeft);
      EXPECT_EQ(exchange->absences()[0].iteration, 7);
    }
  }
}

// Its process ends, but it had said before that it leaves.
TEST_P(StatusProtocolTest, ARankThatHasLeftIsNotLost) {
  Ranks ranks(GetParam());
  ranks.begin_all({.sequence = 1});
  ranks.deliver_all();
  ranks[0].leave(kChannel, {.sequence = 1, .iteration = 7});
  ranks.kill(0);
  std::vector<ExchangePtr> later;
  for (int rank = 1; rank < ranks.size(); ++rank) {
    later.push_back(ranks.begin(rank, {.sequence = 2}));
  }
  ranks.deliver_all();
  for (const ExchangePtr& exchange : later) {
    ASSERT_EQ(outcome_of(exchange), kBroken);
    ASSERT_THAT(absent_ranks(exchange), ElementsAre(0));
    EXPECT_EQ(exchange->absences()[0].reason, AbsenceReason::kLeft);
  }
}

TEST_P(StatusProtocolTest, WhoAbortsEndsTheWaitOfAllAndTellsItsWords) {
  if (GetParam() == 2) GTEST_SKIP() << "needs a rank that is not there";
  Ranks ranks(GetParam());
  const int late = GetParam() / 2;
  std::vector<ExchangePtr> exchanges;
  const RankStatus failed = {.kind = kFailed,
                             .sequence = 1,
                             .iteration = 7,
                             .text = status_text("bad input")};
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank == late) continue;
    exchanges.push_back(
        ranks.begin(rank, rank == 0 ? failed : RankStatus{.sequence = 1}));
  }
  ranks.deliver_all();
  EXPECT_THAT(outcomes_of(exchanges), Each(kPending));
  ranks[0].abort_exchanges(failed);
  ranks.deliver_all();
  EXPECT_THAT(outcomes_of(exchanges), Each(kBroken));
  exchanges.push_back(ranks.begin(late, {.sequence = 1}));
  for (const ExchangePtr& exchange : exchanges) {
    EXPECT_EQ(describe(exchange->absences()),
              "rank 0 failed in iteration 7: bad input; rank 0 waits no "
              "longer");
  }
}

TEST_P(StatusProtocolTest, TheWordsOfARankThatDiesReachTheOthers) {
  if (GetParam() < 4) GTEST_SKIP() << "needs ranks that it tells nothing";
  Ranks ranks(GetParam());
  const RankStatus failed = {.kind = kFailed,
                             .sequence = 1,
                             .iteration = 7,
                             .text = status_text("bad input")};
  std::vector<ExchangePtr> exchanges;
  ranks.begin(1, failed);
  ranks.deliver_all();
  ranks.kill(1);
  ranks.deliver_all();
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank == 1) continue;
    exchanges.push_back(ranks.begin(rank, {.sequence = 1}));
    ASSERT_EQ(outcome_of(exchanges.back()), kBroken);
    EXPECT_EQ(describe(exchanges.back()->absences()),
              "rank 1 failed in iteration 7: bad input; the connection of "
              "rank 1 is closed");
  }
}

TEST_P(StatusProtocolTest, ForeignMessagesAreDropped) {
  Ranks ranks(GetParam());
  const std::vector<std::byte> noise(300, std::byte{0xFF});
  for (size_t length = 0; length <= noise.size(); ++length) {
    ranks[0].on_message(1, Bytes(noise).first(length));
  }
  const auto exchanges = ranks.begin_all({.sequence = 1});
  ranks.deliver_all();
  EXPECT_THAT(outcomes_of(exchanges), Each(kAgreed));
}

TEST_P(StatusProtocolTest, TakesTheMemoryOfEarlierExchangesAgain) {
  Ranks ranks(GetParam());
  std::set<const void*> used;
  for (int64_t i = 1; i <= 20; ++i) {
    const auto exchanges = ranks.begin_all({.sequence = i});
    used.insert(exchanges.front().get());
    ranks.deliver_all();
  }
  EXPECT_EQ(used.size(), 1);
}

// What may happen to exchanges at random: they differ, ranks come late, die in
// the middle of what they send, leave, abort.
class Fuzz {
 public:
  Fuzz(int size, unsigned seed) : ranks_(size, seed), next_(size, 1) {
    differing_ = below(2) == 0 ? 1 + below(kLast) : 0;
    exchanges_.resize(size);
  }

  void run() {
    for (int step = 0; step < 40 * ranks_.size(); ++step) {
      const int rank = below(ranks_.size());
      const int what = below(100);
      if (what < 25) {
        begin(rank);
      } else if (what == 25 && departed_.size() < 2) {
        depart(rank);
      } else {
        ranks_.deliver_one();
      }
    }
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      while (next_[rank] <= kLast && !departed_.contains(rank)) begin(rank);
    }
    ranks_.deliver_all();
  }

  void check() {
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      if (ranks_.is_dead(rank)) continue;
      for (size_t i = 0; i < exchanges_[rank].size(); ++i) {
        const ExchangePtr& exchange = exchanges_[rank][i];
        const Outcome outcome = outcome_of(exchange);
        if (outcome == kBroken) {
          EXPECT_GT(static_cast<int>(i) + 1, last_of_all_);
          EXPECT_THAT(absent_ranks(exchange), Not(IsEmpty()));
          EXPECT_THAT(absent_ranks(exchange), IsSubsetOf(departed_));
          continue;
        }
        const bool differs = static_cast<int>(i) + 1 == differing_;
        ASSERT_EQ(outcome, differs ? kDiffer : kAgreed);
        if (!differs) continue;
        for (int of = 0; of < ranks_.size(); ++of) {
          ASSERT_EQ(exchange->received()[of].iteration, of);
        }
      }
    }
  }

 private:
  static constexpr int kLast = 4;  // sequence

  int below(int limit) { return static_cast<int>(ranks_.random()() % limit); }

  void begin(int rank) {
    if (departed_.contains(rank) || next_[rank] > kLast) return;
    const int sequence = next_[rank]++;
    exchanges_[rank].push_back(
        ranks_.begin(rank, {.sequence = sequence,
                            .iteration = sequence == differing_ ? rank : 100}));
  }

  void depart(int rank) {
    if (!departed_.insert(rank).second) return;
    const int what = below(4);
    if (what == 0) ranks_.kill(rank, below(4));
    if (what == 1) ranks_[rank].abort_exchanges({});
    if (what >= 2) ranks_[rank].leave(kChannel, {.sequence = next_[rank] - 1});
    if (what == 3) ranks_.kill(rank);
    last_of_all_ = what == 2 ? std::min(last_of_all_, next_[rank] - 1) : 0;
  }

  Ranks ranks_;
  std::vector<int> next_;  // sequences
  int differing_;
  std::set<int> departed_;
  int last_of_all_ = kLast;                          // that must end well
  std::vector<std::vector<ExchangePtr>> exchanges_;  // by rank
};

TEST_P(StatusProtocolTest, WhateverHappensNobodyWaitsForEver) {
  const unsigned num_seeds = 2000 / GetParam();
  for (unsigned seed = 0; seed < num_seeds; ++seed) {
    Fuzz fuzz(GetParam(), seed);
    fuzz.run();
    fuzz.check();
    if (::testing::Test::HasFailure()) {
      FAIL() << "with " << GetParam() << " ranks and seed " << seed;
    }
  }
}

}  // namespace
}  // namespace brigade
