// Iterations on devices deliver gradients before the statuses of all ranks are
// known: how far a host runs ahead of late peers, and the effect of a peer's
// failure.

#include <torch/torch.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <latch>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/status/status_channel.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/recording_group.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace run_ahead_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::set_timeout;
using testing::StreamedTraining;
using testing::StreamLayout;
using testing::text_of;

// Returns statuses in which rank 1 fails in `iteration`.
auto peer_that_fails_in(int64_t iteration) {
  return [iteration](const RankStatus& own) {
    std::vector<RankStatus> by_rank(testing::kWorldSize, own);
    if (own.kind == StatusKind::kEnd && own.iteration == iteration) {
      by_rank[1].kind = StatusKind::kFailed;
      by_rank[1].text = status_text("no memory");
    }
    return by_rank;
  };
}

// max_unconfirmed_iterations, whether a buffer is broadcast.
class RunAheadTest
    : public simulated::StreamTest,
      public ::testing::WithParamInterface<std::tuple<int, bool>> {
 protected:
  static int max_ahead() { return std::get<0>(GetParam()); }

  // Trains past the first iterations, whose statuses a rank awaits: they record
  // the order of gradients.
  void begin(std::chrono::milliseconds timeout = std::chrono::seconds(10)) {
    step_ = 0;
    training_.emplace(StreamLayout{});
    set_timeout(training_->recording(), timeout);
    ReducerOptions options;
    options.max_unconfirmed_iterations = max_ahead();
    training_->make_reducer(std::move(options));
    train(3);
  }

  void train(int num_steps) {
    for (int last = step_ + num_steps; step_ < last; ++step_) {
      if (std::get<1>(GetParam())) {
        reducer().broadcast_before_forward({buffer_}, /*source=*/0);
      }
      training_->step(step_);
      training_->expect_gradients(step_);
      training_->update();
      training_->zero_grad();
    }
  }

  Reducer& reducer() { return training_->reducer(); }

  void expect_closed(const std::string& reason) {
    EXPECT_FALSE(reducer().can_continue());
    EXPECT_THAT(
        text_of<c10::DistBackendError>([&] { training_->step(0); }),
        AllOf(HasSubstr("found one that was closed"), HasSubstr(reason)));
  }

  // Expects that `call` reports the failure of rank 1 in iteration 4, after
  // `num_after` more iterations.
  void expect_late_failure(int num_after, const std::function<void()>& call) {
    const std::string after =
        num_after == 0 ? "" : absl::StrCat(", and ", num_after, " after it");
    EXPECT_THAT(text_of<c10::DistBackendError>(call),
                AllOf(HasSubstr("iteration 4" + after +
                                ", whose results were delivered"),
                      HasSubstr("rank 1 failed in iteration 4: no memory"),
                      HasSubstr("Load a checkpoint on all ranks")));
    expect_closed("rank 1 failed in iteration 4: no memory");
  }

  void TearDown() override {
    training_.reset();
    StreamTest::TearDown();
  }

  std::optional<StreamedTraining> training_;
  at::Tensor buffer_ = at::zeros({3}, simulated::on_device());
  int step_ = 0;
};

TEST_P(RunAheadTest, TheHostRunsAheadOfLatePeersByTheLimit) {
  begin(std::chrono::milliseconds(20));
  training_->recording().hold_statuses();
  train(1 + max_ahead());
  EXPECT_THROW(train(1), PeerError);
}

TEST_P(RunAheadTest, StatusesOfPeersConfirmSteps) {
  begin();
  for (int round = 0; round < 3; ++round) {
    training_->recording().hold_statuses();
    train(1 + max_ahead());
    training_->recording().release_statuses();
  }
  train(1);
}

// The group closes at most `max_ahead` steps later, sooner if the status
// arrives sooner. Bad gradients are delivered before that.
TEST_P(RunAheadTest, ALateFailureClosesTheGroupAtTheNextStep) {
  for (const int ahead : std::set<int>{1, 1 + max_ahead()}) {
    SCOPED_TRACE(absl::StrCat("the status comes ", ahead, " steps late"));
    begin();
    training_->recording().answer_statuses_with(peer_that_fails_in(4));
    training_->recording().hold_statuses();
    train(ahead);
    training_->recording().release_statuses();
    expect_late_failure(ahead - 1, [&] { train(1); });
  }
}

TEST_P(RunAheadTest, CallsThatAwaitStatusesThrowALateFailure) {
  const std::vector<std::function<void()>> calls = {
      [&] { reducer().await_statuses(); },
      [&] { reducer().shadow_iteration(); },
      [&] { reducer().barrier("came to a forward"); },
      [&] { reducer().set_comm_hook(nullptr); }};
  for (const auto& call : calls) {
    begin();
    training_->recording().answer_statuses_with(peer_that_fails_in(4));
    train(1);
    expect_late_failure(/*num_after=*/0, call);
  }
}

TEST_P(RunAheadTest, DestructionReportsALateFailure) {
  begin();
  training_->recording().answer_statuses_with(peer_that_fails_in(4));
  train(1);
  ::testing::internal::CaptureStderr();
  training_.reset();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("rank 1 failed in iteration 4: no memory"));
}

TEST_P(RunAheadTest, AwaitingStatusesWaitsForLatePeers) {
  begin(std::chrono::milliseconds(20));
  reducer().await_statuses();
  training_->recording().hold_statuses();
  train(1);
  EXPECT_THROW(reducer().await_statuses(), PeerError);
  EXPECT_FALSE(reducer().can_continue());
}

// Its peers continue and get the error later.
TEST_P(RunAheadTest, AFailureOfThisRankClosesItsGroup) {
  begin();
  bool throws = true;
  training_->model().parameters()[2].register_hook([&](const at::Tensor&) {
    if (throws) throw std::runtime_error("no disk");
  });
  EXPECT_THROW(training_->step(step_), std::runtime_error);
  reducer().end_iteration();  // on any thread
  simulated::synchronize_all();
  throws = false;
  EXPECT_THAT(training_->recording().statuses().back(),
              HasSubstr("failed in iteration 4"));
  expect_closed("This rank failed in iteration 4");
}

INSTANTIATE_TEST_SUITE_P(Steps, RunAheadTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 32),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return absl::StrCat(
                               std::get<int>(info.param), "Ahead",
                               std::get<bool>(info.param) ? "WithBuffers" : "");
                         });

struct WeightedImpl : torch::nn::Module {
  WeightedImpl() {
    weight =
        register_parameter("weight", at::ones({3}, simulated::on_device()));
  }
  at::Tensor forward(const at::Tensor& x) { return (weight * x).sum(); }
  at::Tensor weight;
};
TORCH_MODULE(Weighted);

using UnwatchedRunAheadTest = simulated::StreamTest;

// No bad step is evaluated.
TEST_F(UnwatchedRunAheadTest, AForwardUnderNoGradAwaitsStatuses) {
  RecordingGroup recording(testing::kWorldSize);
  Weighted module;
  DistributedDataParallel model(module, recording.group());
  const at::Tensor x = at::ones({3}, simulated::on_device());
  const auto evaluate = [&] {
    const at::NoGradGuard no_grad;
    model(x);
  };
  recording.answer_statuses_with(peer_that_fails_in(4));
  for (int step = 0; step < 4; ++step) {
    evaluate();
    model(x).backward();
  }
  EXPECT_THAT(text_of<c10::DistBackendError>(evaluate),
              HasSubstr("rank 1 failed in iteration 4"));
}

// ---- Ranks with their own devices.

class OneRank {
 public:
  OneRank(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int rank,
          int max_ahead)
      : weights_({weight_on(rank, 3), weight_on(rank, 5)}),
        reducer_(weights_, group,
                 {.bucket_plan = {{1}, {0}},
                  .max_unconfirmed_iterations = max_ahead}) {}

  void step(bool fails = false) {
    const unsigned hook = weights_[0].register_hook([fails](const at::Tensor&) {
      if (fails) throw std::runtime_error("no disk");
    });
    const absl::Cleanup removing = [&] { weights_[0].remove_hook(hook); };
    const at::Tensor loss = weights_[0].sum() + weights_[1].sum();
    reducer_.prepare_for_backward(loss);
    loss.backward();
  }

  Reducer& reducer() { return reducer_; }

 private:
  static at::Tensor weight_on(int rank, int64_t numel) {
    return at::ones({numel}, simulated::on_device(at::kFloat, rank))
        .requires_grad_();
  }

  std::vector<at::Tensor> weights_;
  Reducer reducer_;
};

TEST_F(UnwatchedRunAheadTest, ALateFailureClosesTheGroupOnAllRanks) {
  constexpr int kRanks = 3;
  for (const int max_ahead : {0, 1, 2}) {
    SCOPED_TRACE(max_ahead);
    // These hosts wait for their peers at delivery, so no rank may go on before
    // all have reached the failure.
    std::latch has_failed(kRanks);
    testing::run_ranks_on_devices(
        kRanks,
        [&](const c10::intrusive_ptr<c10d::ProcessGroup>& group, int rank) {
          OneRank own(group, rank, max_ahead);
          for (int s = 0; s < 3; ++s) own.step();
          const bool fails = rank == 1;
          if (fails) {
            EXPECT_THROW(own.step(/*fails=*/true), std::runtime_error);
            own.reducer().end_iteration();
          } else {
            own.step();
          }
          has_failed.arrive_and_wait();
          for (int s = 0; s < 2; ++s) {
            EXPECT_THAT(text_of<c10::DistBackendError>([&] { own.step(); }),
                        HasSubstr(fails ? "This rank failed in iteration 4"
                                        : "rank 1 failed in iteration 4"));
            EXPECT_FALSE(own.reducer().can_continue());
          }
        });
  }
}

TEST_F(UnwatchedRunAheadTest, OneRankContinuesAfterAFailure) {
  testing::run_ranks_on_devices(
      1, [&](const c10::intrusive_ptr<c10d::ProcessGroup>& group, int rank) {
        OneRank own(group, rank, /*max_ahead=*/1);
        own.step();
        EXPECT_THROW(own.step(/*fails=*/true), std::runtime_error);
        own.reducer().end_iteration();
        simulated::synchronize_all();
        EXPECT_TRUE(own.reducer().can_continue());
        own.step();
      });
}

}  // namespace run_ahead_test
}  // namespace brigade
