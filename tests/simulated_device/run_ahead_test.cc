// How far a host goes on while its peers' hosts are late: on a device, where
// nothing of a step keeps it waiting but what ranks tell each other.

#include <ATen/ATen.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/recording_group.h"
#include "brigade/reducer/reducer_options.h"
#include "brigade/tests/simulated_device/stream_layout.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "brigade/tests/support/torch_reducer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using testing::StreamedTraining;
using testing::StreamLayout;

// Beginning with the broadcast of a buffer, if there is one.
void train(StreamedTraining& training, int step,
           const std::optional<at::Tensor>& buffer = std::nullopt) {
  if (buffer) training.reducer().open_iteration({*buffer}, /*source=*/0);
  training.step(step);
  training.expect_gradients(step);
  training.update();
  training.zero_grad();
}

using UnwatchedRunAheadTest = simulated::StreamTest;

class RunAheadTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, bool>> {
 protected:
  static int max_ahead() { return std::get<0>(GetParam()); }

  static std::optional<at::Tensor> buffer() {
    if (!std::get<1>(GetParam())) return std::nullopt;
    return at::zeros({3}, at::TensorOptions(simulated::device()));
  }

  // Past the first iterations. Returns the next step.
  static int begin(StreamedTraining& training,
                   const std::optional<at::Tensor>& buffer) {
    ReducerOptions options;
    options.max_unconfirmed_iterations = max_ahead();
    training.make_reducer(std::move(options));
    int step = 0;
    while (step < kNumFirstSteps) train(training, step++, buffer);
    return step;
  }

  // Past the first iterations, whose end a rank has to know before the next:
  // they tell in which order gradients come.
  static constexpr int kNumFirstSteps = 3;
};

TEST_P(RunAheadTest, HostIsSoManyStepsAheadOfItsPeersHosts) {
  StreamedTraining training{StreamLayout{}};
  const std::optional<at::Tensor> buffer = this->buffer();
  // How long a host waits for what nobody sends here.
  training.recording()
      .group()
      ->getBackend(at::kCPU)
      ->getBackendOptions()
      ->timeout = std::chrono::milliseconds(20);
  int step = begin(training, buffer);

  training.recording().hold_statuses();
  for (int i = 0; i < max_ahead(); ++i) train(training, step++, buffer);
  EXPECT_THROW(train(training, step, buffer), PeerError);
}

TEST_P(RunAheadTest, StepsAreConfirmedWhenPeersHaveCome) {
  StreamedTraining training{StreamLayout{}};
  const std::optional<at::Tensor> buffer = this->buffer();
  int step = begin(training, buffer);
  for (int round = 0; round < 3; ++round) {
    training.recording().hold_statuses();
    for (int i = 0; i < max_ahead(); ++i) train(training, step++, buffer);
    training.recording().release_statuses();
  }
  train(training, step, buffer);
}

TEST_P(RunAheadTest, AFailureIsHeardOfInTheFirstStepBehindItsWords) {
  for (const int ahead : {1, max_ahead() / 2, max_ahead()}) {
    if (ahead == 0) continue;
    SCOPED_TRACE(absl::StrCat("told when the host is ", ahead, " ahead"));
    StreamedTraining training{StreamLayout{}};
    const std::optional<at::Tensor> buffer = this->buffer();
    int step = begin(training, buffer);
    training.recording().answer_statuses_with([](const RankStatus& own) {
      std::vector<RankStatus> by_rank(testing::kWorldSize, own);
      if (own.kind == StatusKind::kEnd && own.iteration == kNumFirstSteps + 1) {
        by_rank[1].kind = StatusKind::kFailed;
      }
      return by_rank;
    });

    training.recording().hold_statuses();
    for (int i = 0; i < ahead; ++i) train(training, step++, buffer);
    training.recording().release_statuses();
    EXPECT_THROW(train(training, step, buffer), PeerError);
    train(training, step, buffer);
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, RunAheadTest,
                         ::testing::Combine(::testing::Values(1, 4, 32),
                                            ::testing::Bool()));

// A peer's host that is 50 ms late in one step, beside steps of 2 ms on this
// one, which is what benchmarks/run_ahead measures on a clock.
constexpr int kNumStepsMeanwhile = 25;

// Steps that the host has made before that peer has come, if nothing waits for
// it for longer than steps take.
template <typename Step>
int steps_while_peer_is_late(RecordingGroup& recording, const Step& step) {
  recording.hold_statuses();
  int made = 0;
  try {
    while (made < kNumStepsMeanwhile) {
      step();
      ++made;
    }
  } catch (const PeerError&) {
    // The host has waited for what comes behind these steps.
  }
  recording.release_statuses();
  return made;
}

TEST_F(UnwatchedRunAheadTest, HostRunsAsFarAheadOfALatePeerAsWithTorchs) {
  StreamedTraining torchs_training{StreamLayout{}};
  const std::vector<at::Tensor> parameters =
      torchs_training.model().parameters();
  std::vector<std::vector<size_t>> bucket_plan;
  for (size_t i = parameters.size(); i-- > 0;) bucket_plan.push_back({i});
  const auto torchs = testing::make_torch_reducer(
      parameters, std::move(bucket_plan), torchs_training.recording().group());
  int step = 0;
  const auto train_with_torchs = [&] {
    const at::Tensor loss = torchs_training.loss(step);
    torchs->prepare_for_backward({loss});
    loss.backward();
    torchs_training.expect_gradients(step++);
    torchs_training.zero_grad(/*set_to_none=*/false);
  };
  while (step < 3) train_with_torchs();
  const int ahead_with_torchs =
      steps_while_peer_is_late(torchs_training.recording(), train_with_torchs);

  StreamedTraining training{StreamLayout{}};
  training.make_reducer({});
  training.recording()
      .group()
      ->getBackend(at::kCPU)
      ->getBackendOptions()
      ->timeout = std::chrono::milliseconds(20);
  int own_step = 0;
  while (own_step < 3) train(training, own_step++);
  const int ahead = steps_while_peer_is_late(
      training.recording(), [&] { train(training, own_step++); });

  EXPECT_EQ(ahead_with_torchs, kNumStepsMeanwhile);
  EXPECT_EQ(ahead, ahead_with_torchs);
  for (int i = 0; i < 3; ++i) train(training, own_step++);
}

// As torch's reducer, which tells peers nothing.
TEST_F(UnwatchedRunAheadTest, NothingIsWaitedFor) {
  StreamedTraining training{StreamLayout{}};
  ReducerOptions options;
  options.control_channel = false;
  training.make_reducer(std::move(options));
  training.recording().hold_statuses();
  for (int step = 0; step < 50; ++step) train(training, step);
  EXPECT_THAT(training.recording().statuses(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace brigade
