// Every transition between the phases of an iteration (engine/state/phase.h),
// seen from outside: what may be called, what becomes of gradients, and what
// peers are told.

#include "brigade/engine/state/phase.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <exception>
#include <functional>
#include <stdexcept>
#include <vector>

#include "brigade/tests/engine/engine_fixture.h"
#include "brigade/tests/engine/scripted_policy.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::owners_word;
using ::testing::SizeIs;
using testing::Step;
using ::testing::ThrowsMessage;

// Ends the backward in which it is thrown.
struct EndBackward : std::runtime_error {
  EndBackward() : std::runtime_error("the end") {}
};

class PhaseTest : public testing::EngineFixture {
 protected:
  // Three gradients; entry 1 waits for its owner's word.
  void SetUp() override { sequence({2, owners_word(), 1}); }

  // To the end.
  void train() {
    prepare();
    engine().launch(1);
    backward({2, 1, 0});
  }

  // What is prepared now is reduced to its end, and nothing else was.
  void expect_prepared() {
    const int64_t reduced = engine().statistics().reduced;
    EXPECT_FALSE(has_begun());
    peers_agree();
    engine().launch(1);
    backward({2, 1, 0});
    EXPECT_EQ(engine().statistics().reduced, reduced + 1);
  }

  // No iteration: gradients are local.
  void expect_between() {
    policy().events();
    backward({0});
    expect_events({"local 0"});
    EXPECT_THROW(engine().launch(1), c10::Error);
  }

  // By an error of the owner's word that the backward survives: kFailed.
  void fail_and_go_on() {
    policy().fail(Step::kPack, 1);
    EXPECT_ANY_THROW(engine().launch(1));
  }

  // Likewise, of the network: kOver.
  void lose_and_go_on() {
    policy().fail(Step::kLaunch, 1,
                  std::make_exception_ptr(c10::DistBackendError("gone")));
    policy().unused = {0, 1};  // so that it is entry 1's turn
    EXPECT_THROW(engine().launch(1), c10::DistBackendError);
  }

  // Likewise, of a peer where ranks begin together: kOver.
  void resync_and_go_on() {
    policy().compares_iterations = true;
    peer_fails_at(StatusKind::kBegin);
    EXPECT_THROW(engine().launch(1), c10::DistBackendError);
    policy().compares_iterations = false;
  }

  // `action` is called when the outputs have been reached, before any gradient.
  void step_reaching(const std::function<void()>& action) {
    step({2, 1, 0}, [&action](size_t v) {
      if (v == 2) action();
    });
  }

  int num_aborted() { return static_cast<int>(engine().statistics().aborted); }
};

// ---- prepare()

TEST_F(PhaseTest, PreparesBetweenIterations) {
  prepare();
  expect_prepared();  // behind kIdle, and the next one behind kAtSyncPoint
  prepare();
  expect_prepared();
}

TEST_F(PhaseTest, PreparesAnewWhatHasNotBegun) {
  prepare();
  prepare();
  expect_prepared();
  EXPECT_EQ(engine().statistics().prepared, 2);
  EXPECT_EQ(num_aborted(), 0);
}

TEST_F(PhaseTest, PreparesAnewWhatABackwardHasReached) {
  EXPECT_THROW(step_reaching([this] {
                 prepare();
                 throw EndBackward();
               }),
               EndBackward);
  EXPECT_EQ(num_aborted(), 0);
  expect_prepared();
}

TEST_F(PhaseTest, PreparingAmidSeveralBackwardsRaises) {
  prepare();
  backward({2});
  EXPECT_THAT(
      [&] { prepare(); },
      ThrowsMessage<c10::Error>(HasSubstr("variables 0, 1 got no gradient")));
  EXPECT_EQ(num_aborted(), 1);
  expect_between();
}

TEST_F(PhaseTest, PreparingWithoutFinalizingRaisesAndKeepsTheIteration) {
  engine().set_manual_finalization(true);
  train();
  EXPECT_THAT([&] { prepare(); },
              ThrowsMessage<c10::Error>(HasSubstr("to have finalized")));
  engine().finalize();
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(PhaseTest, PreparingInABackwardThatBringsGradientsIsAnError) {
  EXPECT_THAT(
      [&] {
        step({2, 1, 0}, [this](size_t v) {
          if (v == 1) prepare();
        });
      },
      ThrowsMessage<c10::Error>(
          HasSubstr("outside of the backward of iteration 1")));
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_THAT(take_statuses(),
              ElementsAre(HasSubstr("an exception ended backward")));
  expect_between();
}

TEST_F(PhaseTest, PreparingBehindAnErrorAbortsSilently) {
  EXPECT_THROW(step_reaching([this] {
                 fail_and_go_on();
                 EXPECT_THAT(take_statuses(), IsEmpty());
                 prepare();
                 throw EndBackward();
               }),
               EndBackward);
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("as scripted")));
  expect_prepared();
}

TEST_F(PhaseTest, PreparingBehindALossAbortsAndTellsNobodyAgain) {
  EXPECT_THROW(step_reaching([this] {
                 lose_and_go_on();
                 take_statuses();
                 EXPECT_THROW(prepare(), c10::DistBackendError);
                 EXPECT_THAT(take_statuses(), IsEmpty());
                 throw EndBackward();
               }),
               EndBackward);
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_FALSE(has_begun());
}

TEST_F(PhaseTest, PreparingWhereAllKnowAbortsAndTellsNobodyAgain) {
  EXPECT_THROW(step_reaching([this] {
                 resync_and_go_on();
                 take_statuses();
                 prepare();
                 EXPECT_THAT(take_statuses(), IsEmpty());
                 throw EndBackward();
               }),
               EndBackward);
  EXPECT_EQ(num_aborted(), 1);
  expect_prepared();
}

// ---- Outputs and gradients

TEST_F(PhaseTest, WhatIsReachedHasNotBegun) {
  EXPECT_THROW(step_reaching([this] {
                 EXPECT_FALSE(has_begun());
                 EXPECT_THAT(engine().missing_gradients(), IsEmpty());
                 EXPECT_FALSE(engine().replan());
                 throw EndBackward();
               }),
               EndBackward);
}

TEST_F(PhaseTest, GradientsOfABackwardThatReachesTheOutputsAreTheIterations) {
  const at::Tensor loss = output({0, 1, 2});
  prepare(loss);
  engine().note_local_forward({});
  backward({2});  // undecided
  expect_events({"local 2"});
  EXPECT_FALSE(has_begun());
  loss.backward();
  expect_events({"pack 0", "launch 0", "pack 2"});
  EXPECT_TRUE(has_begun());
}

TEST_F(PhaseTest, AnotherBackwardThroughTheOutputsGoesOnWithTheIteration) {
  const at::Tensor first = output({2});
  const at::Tensor second = output({1, 0});
  engine().prepare(std::vector<at::Tensor>{first, second});
  engine().note_local_forward({});
  first.backward();
  EXPECT_TRUE(has_begun());
  backward({0});  // undecided again
  expect_events({"pack 2", "local 0"});
  second.backward();
  expect_events({"pack 0", "launch 0"});
}

TEST_F(PhaseTest, AGradientBeginsWhatIsPrepared) {
  prepare();
  EXPECT_FALSE(has_begun());
  backward({2});
  EXPECT_TRUE(has_begun());
  EXPECT_EQ(engine().statistics().begun, 1);
  backward({1, 0});
  EXPECT_EQ(engine().statistics().begun, 1);
}

// ---- The end of a backward

TEST_F(PhaseTest, ABackwardWithoutGradientsLeavesItPrepared) {
  const at::Tensor input = at::ones({}).requires_grad_();
  const at::Tensor loss = input * 2;
  prepare(loss);
  loss.backward();
  expect_prepared();
}

TEST_F(PhaseTest, ABackwardWithoutGradientsEndsItIfNoneCanCome) {
  sequence({1, 1});
  policy().ends_without_gradients = true;
  policy().unused = {0, 1};
  const at::Tensor input = at::ones({}).requires_grad_();
  const at::Tensor loss = input * 2;
  prepare(loss);
  loss.backward();
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(PhaseTest, ABackwardThatDoesNotBringAllSuspendsIt) {
  prepare();
  backward({2, 1, 0});
  EXPECT_TRUE(has_begun());
  EXPECT_THAT(take_statuses(), IsEmpty());
  EXPECT_THAT([&] { engine().end_iteration(); },
              ThrowsMessage<c10::Error>(HasSubstr("got no gradient")));
}

TEST_F(PhaseTest, TheEndThatLaunchesIsFollowedByAnotherOne) {
  sequence({1, 1});
  policy().unused_in_end = {1};
  prepare();
  // As a hook may, when it is launched there.
  bool was_over = true;
  policy().when_launched = [&](size_t entry) {
    if (entry != 1) return;
    torch::autograd::Engine::get_default_engine().queue_callback(
        [&] { was_over = engine().statistics().reduced > 0; });
  };
  backward({0});
  EXPECT_FALSE(was_over);
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(PhaseTest, TheLastBackwardEndsIt) {
  train();
  EXPECT_FALSE(has_begun());
  expect_between();
}

TEST_F(PhaseTest, TheEndOfABackwardBehindAnErrorTellsIt) {
  step_reaching([this] {
    fail_and_go_on();
    EXPECT_THAT(take_statuses(), IsEmpty());
  });
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("as scripted")));
  expect_events({"local 2", "local 1", "local 0", "aborted"});
}

TEST_F(PhaseTest, APeerThatCanNotContinueClosesTheGroup) {
  peer_at(StatusKind::kFailed,
          [](RankStatus& peer) { peer.cannot_continue = 1; });
  step_reaching([this] { fail_and_go_on(); });
  EXPECT_THAT(take_statuses(), SizeIs(1));
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_FALSE(engine().can_continue());
  EXPECT_THAT([&] { prepare(); }, ThrowsMessage<c10::DistBackendError>(
                                      HasSubstr("Make a new process group")));
}

TEST_F(PhaseTest, TheEndOfABackwardAfterALossTellsNobodyAgain) {
  step_reaching([this] {
    lose_and_go_on();
    take_statuses();
  });
  EXPECT_THAT(take_statuses(), IsEmpty());
  EXPECT_EQ(num_aborted(), 1);
}

TEST_F(PhaseTest, TheEndOfABackwardWhereAllKnowTellsNobodyAgain) {
  step_reaching([this] {
    resync_and_go_on();
    take_statuses();
  });
  EXPECT_THAT(take_statuses(), IsEmpty());
  EXPECT_EQ(num_aborted(), 1);
}

// ---- Abandoned: an exception ends the backward.

TEST_F(PhaseTest, ABackwardThatIsAbandonedBeforeItsGradientsAborts) {
  EXPECT_THROW(step_reaching([] { throw EndBackward(); }), EndBackward);
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_THAT(take_statuses(),
              ElementsAre(HasSubstr("an exception ended backward")));
  expect_between();
}

TEST_F(PhaseTest, ABackwardThatIsAbandonedAmongItsGradientsAborts) {
  EXPECT_THROW(step({2, 1, 0},
                    [](size_t v) {
                      if (v == 1) throw EndBackward();
                    }),
               EndBackward);
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_THAT(take_statuses(),
              ElementsAre(HasSubstr("an exception ended backward")));
  expect_between();
}

TEST_F(PhaseTest, ABackwardThatIsAbandonedBehindAnErrorTellsTheError) {
  EXPECT_THROW(step_reaching([this] {
                 fail_and_go_on();
                 throw EndBackward();
               }),
               EndBackward);
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("as scripted")));
  EXPECT_EQ(num_aborted(), 1);
}

TEST_F(PhaseTest, ABackwardThatIsAbandonedBehindALossTellsNobodyAgain) {
  EXPECT_THROW(step_reaching([this] {
                 lose_and_go_on();
                 take_statuses();
                 throw EndBackward();
               }),
               EndBackward);
  EXPECT_THAT(take_statuses(), IsEmpty());
  EXPECT_EQ(num_aborted(), 1);
}

// ---- An error in the middle

TEST_F(PhaseTest, NothingIsLaunchedBehindAnError) {
  step_reaching([this] {
    fail_and_go_on();
    EXPECT_THROW(engine().launch(1), c10::Error);
    EXPECT_THROW(engine().deliver_through(0), c10::Error);
    EXPECT_TRUE(recording().log().empty());
  });
}

// ---- finalize() and meet_peers()

TEST_F(PhaseTest, MeetingPeersKeepsWhatIsPrepared) {
  prepare();
  engine().meet_peers("came to a forward");
  EXPECT_THAT(take_statuses(), ElementsAre("came to a forward after iteration 0"));
  expect_prepared();
}

TEST_F(PhaseTest, MeetingPeersInAnotherIterationLaunchesZerosForThem) {
  peer_at(StatusKind::kAsk, [](RankStatus& peer) {
    peer.kind = StatusKind::kEnd;
    ++peer.iteration;
  });
  EXPECT_THAT([&] { engine().meet_peers("came to a forward"); },
              ThrowsMessage<c10::Error>(HasSubstr(
                  "rank 0 came to a forward after iteration 0, rank 1 ended "
                  "iteration 1")));
  expect_events({"rest beside", "substitute 0", "substitute 1", "substitute 2",
                 "aborted"});
  EXPECT_TRUE(engine().can_continue());
  EXPECT_EQ(engine().statistics().begun, 1);
  peers_agree();
  train();
  EXPECT_EQ(engine().statistics().reduced, 1);
}

TEST_F(PhaseTest, IsOverOnThisRankBeforeItsEndIsTold) {
  peer_at(StatusKind::kEnd,
          [](RankStatus&) { throw c10::DistBackendError("no answer"); });
  EXPECT_THROW(train(), c10::DistBackendError);
  EXPECT_FALSE(has_begun());
}

TEST_F(PhaseTest, FinalizingEndsIt) {
  engine().set_manual_finalization(true);
  train();
  EXPECT_TRUE(has_begun());
  engine().finalize();
  expect_between();
}

// ---- A shadow

TEST_F(PhaseTest, AShadowIsAnIteration) {
  prepare();
  engine().shadow();
  expect_between();
}

TEST_F(PhaseTest, AShadowIsNoEndOfAnUnfinishedIteration) {
  prepare();
  backward({2});
  EXPECT_THAT([&] { engine().shadow(); },
              ThrowsMessage<c10::Error>(HasSubstr("got no gradient")));
  EXPECT_EQ(num_aborted(), 1);
}

}  // namespace
}  // namespace brigade
