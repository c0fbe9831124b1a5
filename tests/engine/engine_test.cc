#include "brigade/engine/engine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/tests/engine/engine_fixture.h"
#include "brigade/tests/engine/scripted_policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::left_out;
using testing::owners_word;
using testing::ScriptedError;
using testing::Step;
using ::testing::ThrowsMessage;
using testing::without_unit;

std::exception_ptr network_error() {
  return std::make_exception_ptr(
      c10::DistBackendError("connection reset by peer"));
}

std::exception_ptr runtime_error() {
  return std::make_exception_ptr(
      c10::Error(c10::SourceLocation{}, "no memory"));
}

class EngineTest : public testing::EngineFixture {
 protected:
  // A user's hook, which may fail on one rank alone.
  void use_hook() { policy().traits.fails_by_network_only = false; }

  static bool is_outcome(const std::string& event) {
    return event == "delivered" || event == "aborted" ||
           event == "delivery failed";
  }
};

// ---- One backward.

TEST_F(EngineTest, ReducesABackward) {
  sequence({2, 1, 0});
  step({2, 1, 0});
  expect_events({"pack 1", "pack 0", "launch 0", "launch 1", "launch 2",
                 "end confirmed", "deliver 0", "deliver 1", "deliver 2",
                 "delivered"});
  const EngineStatistics counts = engine().statistics();
  EXPECT_EQ(counts.prepared, 1);
  EXPECT_EQ(counts.begun, 1);
  EXPECT_EQ(counts.reduced, 1);
  EXPECT_EQ(counts.aborted, 0);
  EXPECT_EQ(counts.units_launched, 3);
}

TEST_F(EngineTest, ReducesOneIterationAfterTheOther) {
  sequence({1, 1});
  for (int s = 0; s < 3; ++s) {
    step(s % 2 == 0 ? Variables{0, 1} : Variables{1, 0});
  }
  EXPECT_EQ(engine().statistics().reduced, 3);
  EXPECT_THAT(take_statuses(),
              ElementsAre(HasSubstr("ended iteration 1"),
                          HasSubstr("ended iteration 2"),
                          HasSubstr("ended iteration 3")));
}

TEST_F(EngineTest, DeliversWhatIsLeftOutButNotWhatHasNoUnit) {
  sequence({left_out(1), without_unit(0), 1});
  step({0, 1});
  expect_events({"pack 0", "launch 1", "pack 2", "launch 2", "end confirmed",
                 "deliver 0", "deliver 2", "delivered"});
}

TEST_F(EngineTest, WhatIsKnownNotToComeIsReadyWhenBackwardBegins) {
  sequence({2, 1});
  policy().unused = {0, 1};
  prepare();
  expect_events({});
  backward({2});
  expect_events({"pack 0", "launch 0", "pack 1", "launch 1", "end confirmed",
                 "deliver 0", "deliver 1", "delivered"});
}

TEST_F(EngineTest, WhatOnlyTheEndTellsIsLaunchedThere) {
  sequence({2, 1});
  policy().unused_in_end = {0, 1};
  prepare();
  backward({2});
  expect_events({"pack 1", "pack 0", "launch 0", "launch 1", "end confirmed",
                 "deliver 0", "deliver 1", "delivered"});
}

TEST_F(EngineTest, MayLaunchBeforeTheFirstGradient) {
  sequence({0, 1});
  policy().begins_with_outputs = true;
  step({0}, [this](size_t) { expect_events({"launch 0"}); });
  expect_events({"pack 1", "launch 1", "end confirmed", "deliver 0",
                 "deliver 1", "delivered"});
}

TEST_F(EngineTest, DeliversAtTheBeginWhatThePolicyAsksFor) {
  sequence({0, 1});
  policy().delivered_at_begin = 0;
  step({0});
  expect_events({"launch 0", "deliver 0", "pack 1", "launch 1", "end confirmed",
                 "deliver 1", "delivered"});
}

TEST_F(EngineTest, GradientsOutsideOfAnIterationAreLocal) {
  sequence({1, 1});
  backward({1, 0});
  expect_events({"local 1", "local 0"});
  EXPECT_THAT(take_statuses(), IsEmpty());
}

TEST_F(EngineTest, ABackwardOfALocalForwardIsNotTheIterations) {
  sequence({1, 1});
  const at::Tensor loss = output({1, 0});
  prepare(loss);
  engine().note_local_forward({});
  backward({0, 1});
  expect_events({"local 0", "local 1"});
  EXPECT_FALSE(has_begun());
  loss.backward();
  EXPECT_EQ(engine().statistics().reduced, 1);
}

// Whichever forward came first, and though its graph is not the prepared one's.
TEST_F(EngineTest, ABackwardOfAnEarlierLocalForwardIsNotTheIterations) {
  sequence({1, 1});
  const at::Tensor local = output({1, 0});
  engine().note_local_forward(std::vector{local});
  const at::Tensor loss = output({1, 0});
  prepare(loss);
  local.backward();
  expect_events({"local 1", "local 0"});
  EXPECT_FALSE(has_begun());
  loss.backward();
  expect_events({"pack 1", "pack 0", "launch 0", "launch 1", "end confirmed",
                 "deliver 0", "deliver 1", "delivered"});
}

// And one through both is.
TEST_F(EngineTest, ABackwardThroughAnEarlierLocalForwardTooIsTheIterations) {
  sequence({1, 1});
  const at::Tensor local = output({0});
  engine().note_local_forward(std::vector{local});
  const at::Tensor loss = output({1, 0});
  prepare(loss);
  (loss + local).backward();
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, ALocalBackwardThatFailsLeavesNothingBehind) {
  sequence({1, 1});
  at::Tensor local = output({1, 0}, [](size_t v) {
    if (v == 1) throw ScriptedError("in a hook");
  });
  engine().note_local_forward(std::vector{local});
  prepare(output({1, 0}));
  EXPECT_THROW(local.backward(), ScriptedError);
  backward({1, 0});  // through other graphs: the iteration's, as before
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, PreparesNothingWhereNoGradientIsExpected) {
  sequence({1});
  policy().has_gradients_to_come = false;
  prepare();
  backward({0});
  expect_events({"local 0"});
  EXPECT_EQ(engine().statistics().prepared, 0);
}

TEST_F(EngineTest, IsToldOfGradientsThatItDoesNotWatch) {
  sequence({1, 1});
  engine().stop_watching_gradients("caller");
  prepare();
  backward({1, 0}, [this](size_t v) {
    engine().gradient_ready({.parameter = v}, /*is_defined=*/true);
  });
  expect_events({"pack 1", "pack 0", "launch 0", "launch 1", "end confirmed",
                 "deliver 0", "deliver 1", "delivered"});
}

TEST_F(EngineTest, AGraphMayOutliveTheEngine) {
  sequence({1});
  const at::Tensor loss = output({0});
  prepare(loss);
  sequence({1});
  loss.backward();
  EXPECT_EQ(engine().statistics().reduced, 0);
}

// ---- Several backwards.

TEST_F(EngineTest, SeveralBackwardsMayBringTheGradients) {
  sequence({2, 1, 0});
  prepare();
  backward({2});
  expect_events({"pack 1"});
  EXPECT_TRUE(has_begun());
  EXPECT_THAT(engine().missing_gradients(), ElementsAre(0, 1));
  backward({0});
  expect_events({});
  EXPECT_THAT(take_statuses(), IsEmpty());
  backward({1});
  expect_events({"pack 0", "launch 0", "launch 1", "launch 2", "end confirmed",
                 "deliver 0", "deliver 1", "deliver 2", "delivered"});
  EXPECT_FALSE(has_begun());
  EXPECT_THAT(engine().missing_gradients(), IsEmpty());
}

TEST_F(EngineTest, ABackwardThatHasToBringAllGradientsMissesSome) {
  sequence({2, 1}, /*one_backward_per_forward=*/true);
  prepare();
  EXPECT_THAT([&] { backward({0}); },
              ThrowsMessage<c10::Error>(HasSubstr(
                  "variables 1, 2 got no gradient in iteration 1 on rank 0")));
  expect_events({"aborted"});
  EXPECT_THAT(take_statuses(),
              ElementsAre(HasSubstr("variables 1, 2 got no gradient")));
}

TEST_F(EngineTest, AnIterationThatGetsNoMoreGradientsMissesSome) {
  sequence({1, 1});
  for (const bool by_preparing : {true, false}) {
    prepare();
    backward({0});
    EXPECT_THAT([&] { by_preparing ? prepare() : engine().end_iteration(); },
                ThrowsMessage<c10::Error>(
                    HasSubstr("variables 1 got no gradient in iteration")));
    expect_events({"pack 0", "launch 0", "aborted"});
  }
  step({0, 1});
  EXPECT_EQ(engine().statistics().reduced, 1);
  EXPECT_EQ(engine().statistics().aborted, 2);
}

TEST_F(EngineTest, RefusesAGradientThatComesTwice) {
  sequence({1, 1});
  prepare();
  backward({0});
  EXPECT_THAT([&] { backward({0}); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("variable 0 came twice in iteration 1 on rank 0")));
  expect_events({"pack 0", "launch 0", "aborted"});
}

TEST_F(EngineTest, RefusesAGradientOfAnIterationThatIsOver) {
  sequence({1});
  const at::Tensor loss = output({0});
  prepare(loss);
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THAT([&] { loss.backward(); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("variable 0 came after iteration 1 on rank 0")));
  EXPECT_EQ(engine().statistics().reduced, 1);
}

// ---- By their owner's word.

TEST_F(EngineTest, AnOwnersWordOutsideOfABackwardBeginsTheIteration) {
  sequence({owners_word(), 1});
  prepare();
  engine().launch(0);
  expect_events({"pack 0", "launch 0"});
  EXPECT_TRUE(has_begun());
  backward({0});
  expect_events({"pack 1", "launch 1", "end confirmed", "deliver 0",
                 "deliver 1", "delivered"});
}

TEST_F(EngineTest, AnOwnersWordInABackwardIsHeardInItsTurn) {
  sequence({1, owners_word(), 1});
  step({1, 0}, [this](size_t v) {
    if (v == 0) engine().launch(1);
  });
  expect_events({"pack 2", "pack 1", "pack 0", "launch 0", "launch 1",
                 "launch 2", "end confirmed", "deliver 0", "deliver 1",
                 "deliver 2", "delivered"});
}

TEST_F(EngineTest, AnOwnersWordBetweenTwoBackwardsIsHeard) {
  sequence({1, owners_word(), 1});
  prepare();
  backward({0});
  engine().launch(1);
  expect_events({"pack 0", "launch 0", "pack 1", "launch 1"});
  backward({1});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, TheLastOwnersWordOutsideOfABackwardEndsTheIteration) {
  sequence({owners_word(), 1, owners_word()});
  prepare();
  engine().launch(0);
  backward({0});
  policy().events();
  engine().launch(2);
  expect_events({"pack 2", "launch 2", "end confirmed", "deliver 0",
                 "deliver 1", "deliver 2", "delivered"});
  EXPECT_FALSE(has_begun());
  EXPECT_EQ(engine().statistics().reduced, 1);
}

// Not in the middle of it.
TEST_F(EngineTest, TheLastOwnersWordInABackwardEndsTheIterationWithIt) {
  sequence({1, owners_word()});
  prepare();
  backward({0});
  policy().events();
  const at::Tensor factor = at::ones({}).requires_grad_() * 1;
  factor.register_hook([this](const at::Tensor&) {
    engine().launch(1);
    expect_events({"pack 1", "launch 1"});
  });
  factor.backward();
  expect_events({"end confirmed", "deliver 0", "deliver 1", "delivered"});
}

TEST_F(EngineTest, WhenTheLastOwnersWordEndsTheIterationAPeersFailureIsRaised) {
  sequence({owners_word()});
  prepare();
  peer_fails_at(StatusKind::kEnd);
  EXPECT_THROW(engine().launch(0), c10::DistBackendError);
  peers_agree();
  expect_events({"pack 0", "launch 0", "aborted"});
}

TEST_F(EngineTest, AnOwnersWordFinalizesNothingThatIsToBeFinalized) {
  sequence({owners_word()});
  engine().set_manual_finalization(true);
  prepare();
  engine().launch(0);
  expect_events({"pack 0", "launch 0"});
  engine().finalize();
  expect_events({"end confirmed", "deliver 0", "delivered"});
}

TEST_F(EngineTest, ASecondWordForAnEntryIsAnError) {
  sequence({1, owners_word()});
  prepare();
  engine().launch(1);
  for (const size_t entry : {1, 7}) {
    EXPECT_THAT([&] { engine().launch(entry); },
                ThrowsMessage<c10::Error>(
                    HasSubstr("waits for nothing more in this iteration")));
  }
  backward({0});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, AnOwnersWordNeedsAnIteration) {
  sequence({owners_word(), 1});
  const auto launches = [this] { engine().launch(0); };
  EXPECT_THAT(launches, ThrowsMessage<c10::Error>(HasSubstr(
                            "Engine::launch: no iteration is prepared")));
  expect_events({});
  prepare();
  launches();
  backward({0});
  policy().events();
  EXPECT_THROW(launches(), c10::Error);
}

TEST_F(EngineTest, ALaunchThatFailsOutsideOfABackwardEndsTheIteration) {
  sequence({owners_word(), 1});
  use_hook();
  for (const Step place : {Step::kPack, Step::kLaunch}) {
    policy().fail(place, 0);
    prepare();
    EXPECT_ANY_THROW(engine().launch(0));
    const std::vector<std::string> events = policy().events();
    EXPECT_EQ(events.back(), "aborted");
    EXPECT_EQ(std::ranges::count_if(events, is_outcome), 1);
    EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("as scripted")));
  }
}

// ---- Early delivery.

TEST_F(EngineTest, DeliversInTheMiddleOfABackward) {
  sequence({1, 1, 1});
  step({0, 1, 2}, [this](size_t v) {
    if (v == 2) engine().deliver_through(0);
  });
  expect_events({"pack 0", "launch 0", "pack 1", "launch 1", "deliver 0",
                 "pack 2", "launch 2", "end confirmed", "deliver 1",
                 "deliver 2", "delivered"});
}

TEST_F(EngineTest, DeliversAllUpToAnEntryOnce) {
  sequence({1, left_out(0), without_unit(0), 1});
  prepare();
  backward({0});
  policy().events();
  engine().deliver_through(2);
  expect_events({"deliver 0", "deliver 1", "deliver 2"});
  engine().deliver_through(1);
  expect_events({});
  backward({1});
  expect_events(
      {"pack 3", "launch 3", "end confirmed", "deliver 3", "delivered"});
}

TEST_F(EngineTest, AUsersResultsMayBeDeliveredEarlyToo) {
  sequence({1, 1});
  use_hook();
  prepare();
  backward({0});
  engine().deliver_through(0);
  backward({1});
  expect_events({"pack 0", "launch 0", "deliver 0", "pack 1", "launch 1",
                 "end confirmed", "deliver 1", "delivered"});
}

TEST_F(EngineTest, DeliversOnlyWhatHasBeenLaunched) {
  sequence({1, 1});
  const auto expect_refused = [this](size_t entry) {
    EXPECT_THAT([&] { engine().deliver_through(entry); },
                ThrowsMessage<c10::Error>(
                    HasSubstr(absl::StrCat("Engine::deliver_through: entry ",
                                           entry, " has not been launched"))));
  };
  expect_refused(0);
  prepare();
  expect_refused(0);
  backward({0});
  expect_refused(1);
  backward({1});
  expect_refused(0);
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, WhatWasDeliveredEarlyIsTakenBackIfAPeerFails) {
  sequence({1, 1});
  prepare();
  backward({0});
  engine().deliver_through(0);
  peer_fails_at(StatusKind::kEnd);
  EXPECT_THROW(backward({1}), c10::DistBackendError);
  expect_events(
      {"pack 0", "launch 0", "deliver 0", "pack 1", "launch 1", "aborted"});
}

TEST_F(EngineTest, AnEarlyDeliveryThatFailsOutsideOfABackwardIsTold) {
  sequence({1, 1});
  for (const bool is_hook : {false, true}) {
    policy().traits.fails_by_network_only = !is_hook;
    prepare();
    backward({0});
    policy().fail(Step::kDeliver, 0, runtime_error());
    EXPECT_THAT([&] { engine().deliver_through(0); },
                ThrowsMessage<c10::Error>(HasSubstr("no memory")));
    expect_events({"pack 0", "launch 0", "aborted"});
    EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("no memory")));
    EXPECT_TRUE(engine().can_continue());
  }
}

TEST_F(EngineTest, AnEarlyDeliveryThatFailsInABackwardEndsIt) {
  sequence({1, 1});
  use_hook();
  policy().fail(Step::kDeliver, 0);
  EXPECT_THAT(
      [&] {
        step({0, 1}, [this](size_t v) {
          if (v == 1) engine().deliver_through(0);
        });
      },
      ThrowsMessage<c10::Error>(HasSubstr("as scripted")));
  expect_events({"pack 0", "launch 0", "aborted"});
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("as scripted")));
}

TEST_F(EngineTest, AResultLostByTheNetworkLosesTheGroup) {
  sequence({1, 1});
  recording().fail_at_completion(0, network_error());
  prepare();
  backward({0});
  EXPECT_THAT([&] { engine().deliver_through(0); },
              ThrowsMessage<c10::DistBackendError>(
                  HasSubstr("Engine: entry 0 in iteration 1 on rank 0")));
  expect_events({"pack 0", "launch 0", "aborted"});
  EXPECT_FALSE(engine().can_continue());
}

// ---- As a shadow.

TEST_F(EngineTest, AShadowLaunchesSubstitutesAndDeliversNothing) {
  sequence({2, left_out(1), 0, owners_word()});
  for (const bool is_hook : {false, true}) {
    policy().traits.fails_by_network_only = !is_hook;
    engine().shadow();
    expect_events({"substitute 0", "substitute 2", "substitute 3",
                   "end confirmed", "delivered"});
  }
  EXPECT_EQ(engine().statistics().begun, 2);
  EXPECT_EQ(engine().statistics().reduced, 2);
}

TEST_F(EngineTest, AShadowWaitsForWhatDecidesTheRest) {
  sequence({without_unit(0), 0, 1});
  policy().delivered_at_begin = 1;
  engine().shadow();
  expect_events({"substitute 0", "substitute 1", "deliver 0", "substitute 2",
                 "end confirmed", "delivered"});
}

TEST_F(EngineTest, AShadowThatFailsTellsItsPeers) {
  sequence({1, 1});
  use_hook();
  policy().fail(Step::kSubstitute, 1);
  EXPECT_THAT([&] { engine().shadow(); },
              ThrowsMessage<c10::Error>(HasSubstr("as scripted")));
  expect_events({"substitute 0", "aborted"});
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("as scripted")));
  step({0, 1});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

// ---- Failures.

TEST_F(EngineTest, ARankThatFailsLaunchesZerosForTheRest) {
  sequence({1, 1, 1});
  use_hook();
  policy().fail(Step::kPack, 1);
  peer_at(StatusKind::kFailed,
          [](RankStatus& peer) { peer.kind = StatusKind::kEnd; });
  EXPECT_THROW(step({0, 1, 2}), ScriptedError);
  expect_events({"pack 0", "launch 0", "aborted", "rest beside", "substitute 1",
                 "substitute 2"});
  EXPECT_TRUE(engine().can_continue());
  peers_agree();
  step({0, 1, 2});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, APeerThatFailedAtTheEndEndsItHere) {
  sequence({1});
  peer_fails_at(StatusKind::kEnd);
  EXPECT_THAT([&] { step({0}); }, ThrowsMessage<c10::DistBackendError>(
                                      HasSubstr("a peer's error")));
  expect_events({"pack 0", "launch 0", "aborted"});
  EXPECT_TRUE(engine().can_continue());
  peers_agree();
  step({0});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, AUsersResultIsDeliveredOnAllRanksOrOnNone) {
  sequence({1, 1});
  use_hook();
  peer_fails_at(StatusKind::kArrived);
  EXPECT_THROW(step({0, 1}), c10::DistBackendError);
  expect_events({"pack 0", "launch 0", "pack 1", "launch 1", "aborted"});
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("ended iteration 1"),
                                           HasSubstr("iteration 1")));
}

TEST_F(EngineTest, APeerInAnotherPlaceEndsTheIterationOnBoth) {
  sequence({1});
  peer_at(StatusKind::kEnd, [](RankStatus& peer) { ++peer.iteration; });
  EXPECT_THAT([&] { step({0}); }, ThrowsMessage<c10::Error>(HasSubstr(
                                      "expected every rank in the same "
                                      "place")));
  expect_events({"pack 0", "launch 0", "aborted"});
  peers_agree();
  step({0});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, NothingIsLaunchedBeforeRanksHaveBegunTogether) {
  sequence({0, 1});
  policy().compares_iterations = true;
  peer_fails_at(StatusKind::kBegin);
  EXPECT_THROW(step({0}), c10::DistBackendError);
  expect_events({"aborted"});
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("began iteration 1")));
  peers_agree();
  step({0});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, RemembersItsLastError) {
  sequence({1});
  EXPECT_FALSE(engine().last_error().has_value());
  policy().fail(Step::kPack, 0);
  EXPECT_THROW(step({0}), ScriptedError);
  EXPECT_EQ(engine().last_error()->text, "as scripted");
  EXPECT_EQ(engine().last_error()->iteration, 1);
}

struct FailureCase {
  Step step;
  bool is_hook;  // a user's
  const char* outcome;
  bool loses_group;
};

class EngineFailureTest : public EngineTest,
                          public ::testing::WithParamInterface<FailureCase> {};

TEST_P(EngineFailureTest, EndsTheIterationOnce) {
  const FailureCase& failure = GetParam();
  sequence({1, 1, 1});
  policy().traits.fails_by_network_only = !failure.is_hook;
  policy().fail(failure.step, 1);
  EXPECT_ANY_THROW(step({0, 1, 2}));
  const std::vector<std::string> events = policy().events();
  EXPECT_EQ(events.back(), failure.outcome);
  EXPECT_EQ(std::ranges::count_if(events, is_outcome), 1);
  EXPECT_EQ(std::ranges::count(events, "end confirmed"),
            failure.outcome == std::string("delivery failed"));
  EXPECT_EQ(engine().statistics().aborted, 1);
  EXPECT_EQ(engine().statistics().reduced, 0);
  EXPECT_FALSE(has_begun());
  ASSERT_EQ(engine().can_continue(), !failure.loses_group);
  if (failure.loses_group) return;
  step({0, 1, 2});
  EXPECT_EQ(policy().events().back(), "delivered");
}

INSTANTIATE_TEST_SUITE_P(
    Steps, EngineFailureTest,
    ::testing::Values(
        FailureCase{Step::kPack, false, "aborted", false},
        FailureCase{Step::kPack, true, "aborted", false},
        FailureCase{Step::kLaunch, false, "aborted", true},
        FailureCase{Step::kLaunch, true, "aborted", false},
        FailureCase{Step::kResult, false, "delivery failed", false},
        FailureCase{Step::kResult, true, "aborted", false},
        FailureCase{Step::kDeliver, false, "delivery failed", false},
        FailureCase{Step::kDeliver, true, "delivery failed", false}));

TEST_F(EngineTest, DeliversNothingBehindADeliveryThatFailed) {
  sequence({1, 1, 1});
  policy().fail(Step::kDeliver, 1);
  EXPECT_ANY_THROW(step({0, 1, 2}));
  expect_events({"pack 0", "launch 0", "pack 1", "launch 1", "pack 2",
                 "launch 2", "end confirmed", "deliver 0", "delivery failed"});
}

// ---- Another sequence.

TEST_F(EngineTest, ChangesItsSequenceBetweenIterations) {
  sequence({1, 1});
  step({0, 1});
  policy().events();
  engine().change_sequence("caller", [this] {
    policy().adopt({2});
    return true;
  });
  EXPECT_THAT(take_statuses().back(), HasSubstr("began iteration 2"));
  step({0, 1});
  expect_events(
      {"pack 0", "launch 0", "end confirmed", "deliver 0", "delivered"});
}

TEST_F(EngineTest, ChangesTheSequenceOfWhatIsPrepared) {
  sequence({1, 1});
  prepare();
  engine().change_sequence("caller", [this] {
    policy().adopt({2, 0, 0});
    return true;
  });
  backward({0, 1});
  expect_events({"pack 0", "launch 0", "launch 1", "launch 2", "end confirmed",
                 "deliver 0", "deliver 1", "deliver 2", "delivered"});
}

TEST_F(EngineTest, RefusesAnotherSequenceInTheMiddleOfAnIteration) {
  sequence({1, 1});
  prepare();
  backward({0});
  bool is_changed = false;
  EXPECT_THAT(
      [&] {
        engine().change_sequence("caller", [&] { return is_changed = true; });
      },
      ThrowsMessage<c10::Error>(
          HasSubstr("caller: iteration 1 on rank 0 is being reduced")));
  EXPECT_FALSE(is_changed);
  EXPECT_THROW(engine().stop_watching_gradients("caller"), c10::Error);
  backward({1});
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(EngineTest, RefusesASequenceThatPeersDoNotHave) {
  sequence({1, 1});
  peer_at(StatusKind::kBegin, [](RankStatus& peer) { ++peer.fingerprint; });
  EXPECT_THAT(
      [&] {
        engine().change_sequence("caller", [this] {
          policy().adopt({2});
          return true;
        });
      },
      ThrowsMessage<c10::Error>(
          HasSubstr("expected the same plan and options")));
  expect_events({"aborted"});
  EXPECT_EQ(recording().log().size(), 0);
}

TEST_F(EngineTest, PlansAnewWherePreparingAsksForIt) {
  sequence({1, 1});
  step({0, 1});
  policy().replan_to({2});
  policy().events();
  take_statuses();
  step({0, 1});
  expect_events({"replan", "pack 0", "launch 0", "end confirmed", "deliver 0",
                 "delivered"});
  // All ranks have made the same one, and need not compare it.
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("ended iteration 2")));
}

TEST_F(EngineTest, PlansAnewWhenAskedBetweenIterations) {
  sequence({1, 1});
  EXPECT_FALSE(engine().replan());
  policy().replan_to_same();
  prepare();
  backward({0});
  policy().replan_to({2});
  EXPECT_FALSE(engine().replan());
  backward({1});
  EXPECT_TRUE(engine().replan());
  EXPECT_FALSE(engine().replan());
}

TEST_F(EngineTest, APlanThatRanksCannotAgreeOnLosesTheGroup) {
  sequence({1});
  policy().replan_to_same();
  recording().fail_at_launch(0, network_error());
  EXPECT_THAT([&] { prepare(); },
              ThrowsMessage<c10::DistBackendError>(
                  HasSubstr("Engine: agreeing on a sequence on rank 0")));
  EXPECT_FALSE(engine().can_continue());
}

// ---- Finalized by hand.

TEST_F(EngineTest, DeliversWhenItIsFinalized) {
  sequence({1, 1});
  engine().set_manual_finalization(true);
  step({0, 1});
  expect_events({"pack 0", "launch 0", "pack 1", "launch 1"});
  EXPECT_THAT(take_statuses(), IsEmpty());
  engine().finalize();
  expect_events({"end confirmed", "deliver 0", "deliver 1", "delivered"});
  EXPECT_THROW(engine().finalize(), c10::Error);
}

TEST_F(EngineTest, RefusesToFinalizeWhatIsNotReady) {
  sequence({1, 1});
  EXPECT_THAT([&] { engine().finalize(); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("manual backward finalization is not required")));
  engine().set_manual_finalization(true);
  prepare();
  EXPECT_THAT([&] { engine().finalize(); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("no gradient reduction requires finalization")));
  backward({0});
  EXPECT_THAT([&] { engine().finalize(); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("called before all units were ready: gradients of "
                            "variables 1")));
  EXPECT_THROW(engine().set_manual_finalization(false), c10::Error);
  backward({1});
  engine().finalize();
  engine().set_manual_finalization(false);
}

TEST_F(EngineTest, WhatWasNotFinalizedIsAnErrorOfTheNextForward) {
  sequence({1});
  engine().set_manual_finalization(true);
  step({0});
  EXPECT_THAT([&] { prepare(); },
              ThrowsMessage<c10::Error>(HasSubstr(
                  "Expected to have finalized the prior backward pass")));
}

}  // namespace
}  // namespace brigade
