// Transitions between the phases of an iteration (docs/internals.md, "Phases"):
// the calls that are allowed, the gradients that are reduced, and the statuses
// that are sent.

#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "brigade/comm/status/status_channel.h"
#include "brigade/comm_hooks/comm_hooks.h"
#include "brigade/comm_hooks/hook_traits.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/reducer/toy_model.h"
#include "brigade/tests/support/recording_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace phase_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::expect_trains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using testing::step;
using testing::text_of;
using testing::ToyModel;
using testing::UserError;

std::exception_ptr network_error() {
  return std::make_exception_ptr(c10::DistBackendError("connection closed"));
}

// Rank 0 of two ranks. Rank 1 does the same, unless a test changes it.
class PhaseTest : public ::testing::Test {
 protected:
  PhaseTest() { make_reducer({}); }

  void make_reducer(ReducerOptions options, bool rebuilds = false) {
    const std::vector<std::vector<size_t>> buckets = {{2}, {1}, {0}};
    if (!rebuilds) options.bucket_plan = buckets;
    options.parameter_names = model_.names;
    reducer_ = nullptr;
    num_taken_ = 0;
    reducer_ = std::make_unique<Reducer>(model_.parameters, recording_->group(),
                                         std::move(options), buckets);
    take_statuses();
    num_before_ = recording_->log().size();
  }

  Reducer& reducer() { return *reducer_; }

  // Calls `action` in a backward that has reached the prepared outputs, before
  // any gradient of a parameter.
  void step_reaching(const std::function<void()>& action) {
    at::Tensor loss = model_.loss(0) * 1;
    loss.register_hook([&action](const at::Tensor&) { action(); });
    step(reducer(), loss * 1);
  }

  // Makes the gradient of parameter 2 ready without a backward through it.
  void make_ready(at::Tensor gradient) {
    model_.parameters[2].mutable_grad() = std::move(gradient);
    reducer().gradient_ready(2);
  }

  // Makes a gradient fail, and catches the error: the backward continues, and
  // peers do not know.
  void fail_and_continue() {
    reducer().stop_watching_gradients();
    EXPECT_THAT(
        text_of<c10::Error>([&] { make_ready(at::ones({4}).to_sparse()); }),
        HasSubstr("'p2'"));
    model_.zero_grad();
    EXPECT_THAT(take_statuses(), IsEmpty());
  }

  // Makes the network fail, and catches the error. Peers are informed at once.
  void lose_group_and_continue() {
    reducer().stop_watching_gradients();
    recording_->fail_at_launch(recording_->log().size(), network_error());
    EXPECT_THROW(make_ready(at::ones({4})), c10::DistBackendError);
    model_.zero_grad();
    EXPECT_THAT(take_statuses(), SizeIs(1));
  }

  // At exchanges of `kind` rank 1 sends this rank's status, changed by
  // `change`.
  void peer_at(StatusKind kind, std::function<void(RankStatus&)> change) {
    recording_->answer_statuses_with(
        [kind, change = std::move(change)](const RankStatus& own) {
          RankStatus peer = own;
          if (own.kind == kind) change(peer);
          return std::vector<RankStatus>{own, peer};
        });
  }

  // Returns the statuses that this rank has sent since the last call.
  std::vector<std::string> take_statuses() {
    const std::vector<std::string> all = recording_->statuses();
    const std::vector<std::string> latest(all.begin() + num_taken_, all.end());
    num_taken_ = static_cast<int64_t>(all.size());
    return latest;
  }

  // Number of collectives of iterations.
  size_t num_launched() const { return recording_->log().size() - num_before_; }
  int64_t num_reduced() const { return reducer_->statistics().reduced; }
  int64_t num_aborted() const { return reducer_->statistics().aborted; }

  std::unique_ptr<RecordingGroup> recording_ =
      std::make_unique<RecordingGroup>(2);
  const ToyModel model_{{{2}, {3}, {4}}};

 private:
  std::unique_ptr<Reducer> reducer_;
  int64_t num_taken_ = 0;
  size_t num_before_ = 0;  // collectives of the constructor
};

// ---- prepare_for_backward()

TEST_F(PhaseTest, PreparesAnewAfterABackwardThatHasReachedTheOutputs) {
  EXPECT_THROW(step_reaching([this] {
                 EXPECT_EQ(reducer().statistics().begun, 0);
                 EXPECT_THAT(reducer().missing_gradients(), IsEmpty());
                 reducer().prepare_for_backward(model_.loss(0));
                 throw UserError("the end");
               }),
               UserError);
  EXPECT_EQ(num_aborted(), 0);
  expect_trains(reducer(), model_, /*rank=*/0, /*world_size=*/1);
}

// The next call or the end of the backward sends a caught error. A lost group
// was reported at once.
TEST_F(PhaseTest, PeersReceiveACaughtErrorOnce) {
  const auto prepare = [this] {
    reducer().prepare_for_backward(model_.loss(0));
  };
  const auto end = [] {};
  const auto throw_another = [] { throw UserError("the end"); };
  for (const bool is_lost : {false, true}) {
    for (const auto& next :
         std::vector<std::function<void()>>{prepare, end, throw_another}) {
      recording_ = std::make_unique<RecordingGroup>(2);
      make_reducer({});
      try {
        step_reaching([&] {
          is_lost ? lose_group_and_continue() : fail_and_continue();
          next();
        });
      } catch (const std::exception&) {
      }
      EXPECT_EQ(num_aborted(), 1);
      EXPECT_EQ(reducer().can_continue(), !is_lost);
      if (is_lost) {
        EXPECT_THAT(take_statuses(), IsEmpty());
      } else {
        EXPECT_THAT(take_statuses(), ElementsAre(AllOf(HasSubstr("at launch 0"),
                                                       HasSubstr("'p2'"))));
      }
    }
  }
}

TEST_F(PhaseTest, AFailedRebuildClosesTheGroup) {
  make_reducer({}, /*rebuilds=*/true);
  step(reducer(), model_.loss(0));
  recording_->fail_at_launch(recording_->log().size(), network_error());
  EXPECT_THAT(text_of<c10::DistBackendError>(
                  [&] { reducer().prepare_for_backward(model_.loss(0)); }),
              HasSubstr("Reducer: agreeing on the order of gradients"));
  EXPECT_FALSE(reducer().can_continue());
}

// ---- Local forwards

// Also if the local forward ran before the prepared one.
TEST_F(PhaseTest, ABackwardThroughALocalForwardStaysLocal) {
  const at::Tensor local = model_.loss(0) * 1;
  reducer().note_local_forward({local});
  const at::Tensor loss = model_.loss(0) * 1;
  reducer().prepare_for_backward(loss);
  local.backward();
  EXPECT_EQ(reducer().statistics().begun, 0);
  model_.zero_grad();
  loss.backward();
  EXPECT_EQ(num_reduced(), 1);
  EXPECT_TRUE(at::equal(model_.parameters[0].grad(), model_.gradient(0, 0)));
}
TEST_F(PhaseTest, ALocalBackwardThatThrowsLeavesNoState) {
  at::Tensor local = model_.loss(0) * 1;
  local.register_hook([](const at::Tensor&) { throw UserError("in a hook"); });
  local = local * 1;
  reducer().note_local_forward({local});
  reducer().prepare_for_backward(model_.loss(0));
  EXPECT_THROW(local.backward(), UserError);
  model_.loss(0).backward();  // another graph, so of the iteration
  EXPECT_EQ(num_reduced(), 1);
}

TEST_F(PhaseTest, ALocalBackwardMayRunBetweenTwoOfTheIteration) {
  const at::Tensor first = model_.loss_in_order({2}, 0) * 1;
  const at::Tensor second = model_.loss_in_order({1, 0}, 0) * 1;
  reducer().prepare_for_backward(std::make_tuple(first, second));
  reducer().note_local_forward({});
  first.backward();
  EXPECT_THAT(reducer().missing_gradients(), ElementsAre(0, 1));
  model_.loss_in_order({0}, 0).backward();
  EXPECT_THAT(reducer().missing_gradients(), ElementsAre(0, 1));
  second.backward();
  EXPECT_EQ(num_reduced(), 1);
}

// ---- The end of a backward

TEST_F(PhaseTest, TheEndOfABackwardSendsACaughtError) {
  step_reaching([this] { fail_and_continue(); });
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("'p2'")));
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_EQ(num_launched(), 0);
  EXPECT_TRUE(reducer().can_continue());
}

TEST_F(PhaseTest, APeerThatCannotContinueClosesTheGroup) {
  peer_at(StatusKind::kFailed,
          [](RankStatus& peer) { peer.cannot_continue = 1; });
  step_reaching([this] { fail_and_continue(); });
  EXPECT_THAT(take_statuses(), SizeIs(1));
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_FALSE(reducer().can_continue());
  EXPECT_THAT(text_of<c10::DistBackendError>(
                  [&] { reducer().prepare_for_backward(model_.loss(0)); }),
              HasSubstr("Make a new process group"));
}

TEST_F(PhaseTest, ThePeersOfARankThatFailedGetZeros) {
  peer_at(StatusKind::kFailed,
          [](RankStatus& peer) { peer.kind = StatusKind::kEnd; });
  step_reaching([this] { fail_and_continue(); });
  EXPECT_EQ(num_launched(), 3);
  EXPECT_THAT(take_statuses(), SizeIs(2));
  EXPECT_TRUE(reducer().can_continue());
}
// Comm hooks that are called at the end of a backward may queue callbacks.
TEST_F(PhaseTest, AnEndThatLaunchesWaitsForAnotherEnd) {
  bool was_over = true;
  make_reducer({.static_graph = true,
                .comm_hook = make_comm_hook([&](c10d::GradBucket& bucket) {
                  torch::autograd::Engine::get_default_engine().queue_callback(
                      [&] { was_over = num_reduced() > 0; });
                  return testing::all_reduced(recording_->group(), bucket);
                })});
  step(reducer(), model_.loss(0));
  EXPECT_FALSE(was_over);
  EXPECT_EQ(num_reduced(), 1);
}

// ---- An exception ends the backward

TEST_F(PhaseTest, ABackwardThatThrowsBeforeItsGradientsSendsItsError) {
  EXPECT_THROW(step_reaching([] { throw UserError("the end"); }), UserError);
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_THAT(take_statuses(),
              ElementsAre(HasSubstr("its backward raised an exception")));
  model_.loss(0).backward();  // outside of an iteration
  EXPECT_EQ(reducer().statistics().begun, 1);
}
// ---- Ranks that compare before the first launch

TEST_F(PhaseTest, NothingIsLaunchedBeforeTheBeginStatuses) {
  make_reducer({.find_unused_parameters = true,
                .skip_all_reduce_unused_parameters = true});
  peer_at(StatusKind::kBegin, [](RankStatus& peer) {
    peer.kind = StatusKind::kFailed;
    peer.text = status_text("a peer's error");
  });
  EXPECT_THAT(
      text_of<c10::DistBackendError>([&] { step(reducer(), model_.loss(0)); }),
      HasSubstr("a peer's error"));
  EXPECT_EQ(num_launched(), 0);
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("began iteration 1")));
  EXPECT_EQ(num_aborted(), 1);
  recording_->answer_statuses_with({});
  expect_trains(reducer(), model_, /*rank=*/0, /*world_size=*/1);
}

// ---- set_comm_hook()

TEST_F(PhaseTest, AHookCannotBeReplacedDuringAnIteration) {
  reducer().prepare_for_backward(model_.loss(0));
  model_.loss_in_order({2}, 0).backward();
  EXPECT_THAT(
      text_of<c10::Error>([&] { reducer().set_comm_hook(nullptr); }),
      HasSubstr("Reducer::set_comm_hook: iteration 1 on rank 0 is being"));
  EXPECT_FALSE(reducer().rebuild_buckets());
  model_.loss_in_order({1, 0}, 0).backward();
  EXPECT_EQ(num_reduced(), 1);
}

TEST_F(PhaseTest, AHookThatDiffersFromThePeersIsAnError) {
  peer_at(StatusKind::kBegin, [](RankStatus& peer) { ++peer.fingerprint; });
  EXPECT_THAT(text_of<c10::Error>([&] {
                reducer().set_comm_hook(fp16_hook(recording_->group()));
              }),
              HasSubstr("expected the same plan and options"));
  EXPECT_EQ(num_aborted(), 1);
}

// ---- finalize_backward()

TEST_F(PhaseTest, AnIterationMayEndInFinalize) {
  reducer().set_manual_finalization(true);
  step(reducer(), model_.loss(0));
  EXPECT_THAT(take_statuses(), IsEmpty());
  EXPECT_THAT(text_of<c10::Error>(
                  [&] { reducer().prepare_for_backward(model_.loss(0)); }),
              HasSubstr("Expected to have finalized the prior backward pass"));
  EXPECT_EQ(num_reduced(), 0);
  reducer().finalize_backward();
  EXPECT_EQ(num_reduced(), 1);
  EXPECT_THAT(text_of<c10::Error>([&] { reducer().finalize_backward(); }),
              HasSubstr("no gradient reduction requires finalization"));
}

TEST_F(PhaseTest, NothingIsFinalizedBeforeAllBucketsAreReady) {
  EXPECT_THAT(text_of<c10::Error>([&] { reducer().finalize_backward(); }),
              HasSubstr("manual backward finalization is not required"));
  reducer().set_manual_finalization(true);
  reducer().prepare_for_backward(model_.loss(0));
  model_.loss_in_order({2, 1}, 0).backward();
  EXPECT_THAT(text_of<c10::Error>([&] { reducer().finalize_backward(); }),
              HasSubstr("called before all DDP buckets were ready: gradients "
                        "of parameter 0 ('p0')"));
  EXPECT_THROW(reducer().set_manual_finalization(false), c10::Error);
  model_.loss_in_order({0}, 0).backward();
  reducer().finalize_backward();
  reducer().set_manual_finalization(false);
}

// ---- shadow_iteration()

TEST_F(PhaseTest, AShadowReplacesAPreparedButNotABegunIteration) {
  const at::Tensor loss = model_.loss(0) * 1;
  reducer().prepare_for_backward(loss);
  reducer().shadow_iteration();
  EXPECT_EQ(num_reduced(), 1);
  reducer().prepare_for_backward(loss);
  model_.loss_in_order({2}, 0).backward();
  EXPECT_THAT(text_of<c10::Error>([&] { reducer().shadow_iteration(); }),
              HasSubstr("got no gradient"));
  EXPECT_EQ(num_aborted(), 1);
}

TEST_F(PhaseTest, AShadowThatFailsSendsItsError) {
  bool fails = true;
  make_reducer({.comm_hook = make_comm_hook([&](c10d::GradBucket& bucket) {
                  if (bucket.getIndex() == 1 && std::exchange(fails, false)) {
                    throw UserError("no disk");
                  }
                  return testing::all_reduced(recording_->group(), bucket);
                })});
  EXPECT_THAT(text_of<c10::Error>([&] { reducer().shadow_iteration(); }),
              HasSubstr("no disk"));
  EXPECT_THAT(take_statuses(), ElementsAre(HasSubstr("no disk")));
  EXPECT_EQ(num_aborted(), 1);
  EXPECT_TRUE(reducer().can_continue());
}

}  // namespace phase_test
}  // namespace brigade
