// What an owner does that launches more than the sequence: it begins iterations
// in their backward, asks peers in the middle of one, proposes, and launches
// the rest of an iteration that fails.

#include <string>
#include <utility>
#include <vector>

#include "brigade/tests/engine/engine_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ScriptedError;
using testing::Step;

class AskingTest : public testing::EngineFixture {
 protected:
  void begin_with(std::vector<testing::ScriptedEntry> entries) {
    sequence(entries);
    policy().compares_iterations = true;
  }

  // Its first gradient, or one before it, begins the iteration. `between` is
  // called before each further one.
  void own_backward(const Variables& order,
                    const std::function<void(size_t)>& between = {}) {
    bool has_begun = false;
    backward(order, [&](size_t v) {
      if (!std::exchange(has_begun, true)) return engine().begin_in_backward();
      if (between) between(v);
    });
  }

  template <typename Run>
  std::string error_of(const Run& run) {
    try {
      run();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }
};

TEST_F(AskingTest, ABackwardThatNobodyPreparedIsAnIteration) {
  begin_with({1, 1});
  for (int i = 1; i <= 2; ++i) {
    own_backward({1, 0}, [&](size_t) { engine().begin_in_backward(); });
    expect_events({"pack 1", "pack 0", "launch 0", "launch 1", "end confirmed",
                   "deliver 0", "deliver 1", "delivered"});
    EXPECT_EQ(engine().statistics().reduced, i);
  }
}

TEST_F(AskingTest, GoesOnWhenAllRanksAskTheSame) {
  begin_with({1, 1});
  engine().ask("needs unit 3", 1);
  EXPECT_THAT(take_statuses(), ElementsAre("needs unit 3 after iteration 0"));
  own_backward({0, 1}, [&](size_t) { engine().ask("needs unit 3", 2); });
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(AskingTest, RaisesWherePeersDoSomethingElse) {
  begin_with({1});
  peer_at(StatusKind::kAsk,
          [](RankStatus& peer) { peer.kind = StatusKind::kBegin; });
  EXPECT_THAT(error_of([&] { engine().ask("needs unit 3", 1); }),
              HasSubstr("rank 0 needs unit 3 after iteration 0, rank 1 began "
                        "iteration 0"));
  peer_at(StatusKind::kAsk, [](RankStatus& peer) { peer.fingerprint ^= 1; });
  EXPECT_THAT(error_of([&] { engine().ask("needs unit 3", 1); }),
              HasSubstr("(needs unit 3)"));
  peers_agree();
  own_backward({0});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

// What ranks have launched may differ there, and each launches the rest.
TEST_F(AskingTest, ADifferenceInTheMiddleOfAnIterationEndsItEverywhere) {
  begin_with({1, 1, 1});
  peer_at(StatusKind::kAsk,
          [](RankStatus& peer) { peer.kind = StatusKind::kEnd; });
  EXPECT_THAT(error_of([&] {
                own_backward({0, 1, 2}, [&](size_t v) {
                  if (v == 2) engine().ask("needs unit 3", 1);
                });
              }),
              HasSubstr("needs unit 3"));
  expect_events(
      {"pack 0", "launch 0", "pack 1", "launch 1", "substitute 2", "aborted"});
  take_statuses();
  peers_agree();
  own_backward({0, 1, 2});
  EXPECT_EQ(engine().statistics().reduced, 1);
  EXPECT_EQ(policy().results().at(2), 2) << "of two ranks";
}

// Who asks in the middle of a backward launches the rest: nothing is left to be
// brought in step, though the peer has told of fewer launches, and of other
// plans.
TEST_F(AskingTest, ARankAtTheEndLaunchesNothingForOneThatAsks) {
  begin_with({1, 1});
  peer_at(StatusKind::kEnd, [](RankStatus& peer) {
    peer.kind = StatusKind::kAsk;
    peer.fingerprint ^= 1;
    peer.text = status_text("needs unit 3");
  });
  EXPECT_THAT(error_of([&] {
                own_backward({0, 1});
              }),
              AllOf(HasSubstr("rank 0 ended iteration 1"),
                    HasSubstr("rank 1 needs unit 3 after iteration 1"),
                    Not(HasSubstr("brought in step"))));
  EXPECT_TRUE(engine().can_continue());
  peers_agree();
  own_backward({0, 1});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

// ---- Units that ranks want.

TEST_F(AskingTest, WhatAllWantIsGiven) {
  begin_with({1, 1});
  own_backward({0, 1},
               [&](size_t) { engine().ask("needs unit 3", 1, /*wanted=*/3); });
  expect_events({"pack 0", "launch 0", "give 3 here", "pack 1", "launch 1",
                 "end confirmed", "deliver 0", "deliver 1", "delivered"});
}

TEST_F(AskingTest, WhatAPeerWantsIsGivenBeforeThisRankTellsAgain) {
  begin_with({1});
  for (const StatusKind kind : {StatusKind::kBegin, StatusKind::kEnd}) {
    int64_t num_wanted = 2;
    peer_at(kind, [&](RankStatus& peer) {
      if (num_wanted == 0) return;
      peer.kind = StatusKind::kAsk;
      peer.unit = 5 + num_wanted--;
    });
    own_backward({0});
    EXPECT_EQ(num_wanted, 0);
    const std::string begins = kind == StatusKind::kBegin ? "give 7" : "pack 0";
    EXPECT_EQ(policy().events().front(), begins);
  }
  EXPECT_EQ(engine().statistics().reduced, 2);
}

// Each goes on behind what all want, in one order.
TEST_F(AskingTest, RanksMayWantDifferentUnits) {
  begin_with({1});
  peer_at(StatusKind::kAsk, [](RankStatus& peer) {
    peer.unit = 2;
    peer.fingerprint ^= 1;
  });
  engine().ask("needs unit 3", 1, /*wanted=*/3);
  expect_events({"give 2", "give 3 here"});
  peer_at(StatusKind::kAsk,
          [](RankStatus& peer) { peer.kind = StatusKind::kBegin; });
  engine().ask("needs unit 4", 1, /*wanted=*/4);
  expect_events({"give 4 here"});
}

// The peer has made a step since, say.
TEST_F(AskingTest, NothingIsGivenThatIsNotTheSameOnAllRanks) {
  begin_with({1});
  peer_at(StatusKind::kAsk, [](RankStatus& peer) {
    peer.unit = -1;
    peer.proposal ^= 1;
  });
  EXPECT_THAT(error_of([&] { engine().ask("needs unit 3", 1, /*wanted=*/3); }),
              HasSubstr("needs unit 3"));
  expect_events({"aborted"});
}

TEST_F(AskingTest, NothingIsGivenWhereARankHasFailed) {
  begin_with({1});
  peer_fails_at(StatusKind::kAsk);
  EXPECT_THAT(error_of([&] { engine().ask("needs unit 3", 1, /*wanted=*/3); }),
              HasSubstr("a peer's error"));
  expect_events({"aborted"});
}

TEST_F(AskingTest, ARankThatFailsLaunchesTheRestBeforeItTells) {
  begin_with({1, 1, 1});
  policy().fail(Step::kPack, 1);
  EXPECT_EQ(error_of([&] { own_backward({0, 1, 2}); }), "as scripted");
  expect_events({"pack 0", "launch 0", "rest beside", "substitute 1",
                 "substitute 2", "aborted"});
  EXPECT_THAT(take_statuses().back(),
              HasSubstr("failed in iteration 1 at launch 1: as scripted"));
  own_backward({0, 1, 2});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

// Nobody launches anything of an iteration that ranks have not begun together.
TEST_F(AskingTest, LaunchesNothingOfAnIterationThatDidNotBegin) {
  begin_with({1, 1});
  peer_fails_at(StatusKind::kBegin);
  EXPECT_THAT(error_of([&] {
                own_backward({0, 1});
              }),
              HasSubstr("a peer's error"));
  expect_events({"aborted"});
  peers_agree();
  own_backward({0, 1});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(AskingTest, TellsOfAFailureOutsideOfABackward) {
  begin_with({1});
  take_statuses();
  engine().fail(std::make_exception_ptr(ScriptedError("bad input")));
  EXPECT_THAT(take_statuses(),
              ElementsAre(AllOf(HasSubstr("failed in iteration 1"),
                                HasSubstr(": bad input"))));
  own_backward({0});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(AskingTest, ProposalsDoNotMakeRanksDiffer) {
  begin_with({1});
  own_backward({0});
  expect_events(
      {"pack 0", "launch 0", "end confirmed", "deliver 0", "delivered"});
  peer_at(StatusKind::kEnd, [](RankStatus& peer) { peer.proposal ^= 1; });
  own_backward({0});
  expect_events({"pack 0", "launch 0", "end confirmed, no proposal",
                 "deliver 0", "delivered"});
}

TEST_F(AskingTest, NorDoOrdersAndRanksKnow) {
  begin_with({1});
  EXPECT_TRUE(engine().ask("needs unit 3", 1).orders);
  peer_at(StatusKind::kAsk, [](RankStatus& peer) { peer.order ^= 1; });
  const ToldAlike alike = engine().ask("needs unit 3", 1);
  EXPECT_TRUE(alike.proposals);
  EXPECT_FALSE(alike.orders);
  peer_at(StatusKind::kBegin, [](RankStatus& peer) { peer.order ^= 1; });
  own_backward({0});
  EXPECT_THAT(policy().events(), Contains("begun in other orders"));
  peers_agree();
  own_backward({0});
  EXPECT_THAT(policy().events(), Not(Contains("begun in other orders")));
  peer_at(StatusKind::kEnd, [](RankStatus& peer) { peer.order ^= 1; });
  own_backward({0});
  EXPECT_THAT(policy().events(), Contains("end confirmed, other orders"));
}

// One gets what it wants, in the middle of what others do.
TEST_F(AskingTest, WhoIsGivenAUnitKnowsNothingOfOrders) {
  begin_with({1});
  peer_at(StatusKind::kAsk, [](RankStatus& peer) {
    peer.unit = 2;
    peer.fingerprint ^= 1;
  });
  EXPECT_FALSE(engine().ask("needs unit 3", 1, /*wanted=*/3).orders);
}

struct KeptGradients final {
  void take(VariableIndex variable, const at::Tensor& gradient) {
    taken.emplace_back(variable.parameter, gradient.item<double>());
  }
  std::vector<std::pair<size_t, double>> taken;
};

TEST_F(AskingTest, ASinkGetsGradientsBeforeThePolicyHears) {
  KeptGradients kept;
  make_hooks = [&](std::span<const std::vector<at::Tensor>> replicas,
                   const EngineListener& listener) {
    return std::make_shared<GradientHooks>(replicas, listener, kept);
  };
  begin_with({1, 1});
  own_backward({1, 0});
  EXPECT_THAT(kept.taken, ElementsAre(std::pair(1, 1), std::pair(0, 1)));
  EXPECT_EQ(engine().statistics().reduced, 1);
}

}  // namespace
}  // namespace brigade
