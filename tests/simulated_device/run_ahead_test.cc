// Iterations on devices are delivered before all ranks are known to have ended
// them: how far a host goes on while its peers' hosts are late, and what a
// failure of a peer does then.

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
#include "brigade/comm/recording_group.h"
#include "brigade/comm/status/rank_status.h"
#include "brigade/ddp/distributed_data_parallel.h"
#include "brigade/reducer/reducer.h"
#include "brigade/tests/reducer/failing.h"
#include "brigade/tests/simulated_device/host_backend.h"
#include "brigade/tests/simulated_device/stream_layout.h"
#include "brigade/tests/simulated_device/streamed_training.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace run_ahead_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StreamedTraining;
using testing::StreamLayout;
using testing::text_of;

// Past the first iterations, whose end a rank has to know before the next: they
// tell in which order gradients come.
constexpr int kNumFirstSteps = 3;

// Beginning with the broadcast of a buffer, if there is one.
void train(StreamedTraining& training, int step,
           const std::optional<at::Tensor>& buffer = std::nullopt) {
  if (buffer) {
    training.reducer().broadcast_before_forward({*buffer}, /*source=*/0);
  }
  training.step(step);
  training.expect_gradients(step);
  training.update();
  training.zero_grad();
}

// Rank 1 fails in it.
void fail_peer_in(StreamedTraining& training, int64_t iteration) {
  training.recording().answer_statuses_with([iteration](const RankStatus& own) {
    std::vector<RankStatus> by_rank(testing::kWorldSize, own);
    if (own.kind == StatusKind::kEnd && own.iteration == iteration) {
      by_rank[1].kind = StatusKind::kFailed;
      by_rank[1].text = status_text("no memory");
    }
    return by_rank;
  });
}

// How long a host waits for what nobody sends here.
void shorten_timeout(StreamedTraining& training) {
  training.recording()
      .group()
      ->getBackend(at::kCPU)
      ->getBackendOptions()
      ->timeout = std::chrono::milliseconds(20);
}

auto tells_of_late_failure(int iteration, int num_after) {
  const std::string after =
      num_after == 0 ? "" : absl::StrCat(", and ", num_after, " after it");
  return AllOf(HasSubstr(absl::StrCat("iteration ", iteration, after,
                                      ", whose results were delivered")),
               HasSubstr(absl::StrCat("rank 1 failed in iteration ", iteration,
                                      ": no memory")),
               HasSubstr("Load a checkpoint on all ranks"));
}

void expect_closed(StreamedTraining& training, const std::string& reason) {
  EXPECT_FALSE(training.reducer().can_continue());
  EXPECT_THAT(
      text_of<c10::DistBackendError>([&] { training.step(/*step=*/0); }),
      AllOf(HasSubstr("found one that was closed"), HasSubstr(reason)));
}

// Iterations that may be unconfirmed x whether buffers are broadcast.
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
};

TEST_P(RunAheadTest, HostIsSoManyStepsAheadOfItsPeersHosts) {
  StreamedTraining training{StreamLayout{}};
  const std::optional<at::Tensor> buffer = this->buffer();
  shorten_timeout(training);
  int step = begin(training, buffer);

  training.recording().hold_statuses();
  for (int i = 0; i <= max_ahead(); ++i) train(training, step++, buffer);
  EXPECT_THROW(train(training, step, buffer), PeerError);
}

TEST_P(RunAheadTest, StepsAreConfirmedWhenPeersHaveCome) {
  StreamedTraining training{StreamLayout{}};
  const std::optional<at::Tensor> buffer = this->buffer();
  int step = begin(training, buffer);
  for (int round = 0; round < 3; ++round) {
    training.recording().hold_statuses();
    for (int i = 0; i <= max_ahead(); ++i) train(training, step++, buffer);
    training.recording().release_statuses();
  }
  train(training, step, buffer);
}

// Which is so many steps later at the latest, and sooner if statuses come
// sooner. The gradients are bad by then.
TEST_P(RunAheadTest, ALateFailureClosesTheGroupWhereTheNextStepBegins) {
  for (const int ahead : std::set<int>{1, 1 + max_ahead()}) {
    SCOPED_TRACE(absl::StrCat("told when the host is ", ahead, " ahead"));
    StreamedTraining training{StreamLayout{}};
    const std::optional<at::Tensor> buffer = this->buffer();
    int step = begin(training, buffer);
    fail_peer_in(training, kNumFirstSteps + 1);

    training.recording().hold_statuses();
    for (int i = 0; i < ahead; ++i) train(training, step++, buffer);
    training.recording().release_statuses();
    EXPECT_THAT(
        text_of<c10::DistBackendError>([&] { train(training, step, buffer); }),
        tells_of_late_failure(kNumFirstSteps + 1, ahead - 1));
    expect_closed(training, "rank 1 failed in iteration 4: no memory");
  }
}

TEST_P(RunAheadTest, WhoeverAwaitsStatusesHearsOfALateFailure) {
  using Call = std::function<void(StreamedTraining&)>;
  const std::vector<Call> calls = {
      [](StreamedTraining& t) { t.reducer().await_statuses(); },
      [](StreamedTraining& t) { t.reducer().shadow_iteration(); },
      [](StreamedTraining& t) { t.reducer().meet_peers("came to a forward"); },
      [](StreamedTraining& t) { t.reducer().set_comm_hook(nullptr); }};
  for (const Call& call : calls) {
    StreamedTraining training{StreamLayout{}};
    const std::optional<at::Tensor> buffer = this->buffer();
    int step = begin(training, buffer);
    fail_peer_in(training, kNumFirstSteps + 1);
    train(training, step++, buffer);
    EXPECT_THAT(text_of<c10::DistBackendError>([&] { call(training); }),
                tells_of_late_failure(kNumFirstSteps + 1, /*num_after=*/0));
    expect_closed(training, "rank 1 failed in iteration 4: no memory");
  }
}

TEST_P(RunAheadTest, AwaitingStatusesWaitsForLatePeers) {
  StreamedTraining training{StreamLayout{}};
  const std::optional<at::Tensor> buffer = this->buffer();
  shorten_timeout(training);
  int step = begin(training, buffer);
  training.reducer().await_statuses();
  training.recording().hold_statuses();
  train(training, step++, buffer);
  EXPECT_THROW(training.reducer().await_statuses(), PeerError);
  EXPECT_FALSE(training.reducer().can_continue());
}

// Its peers, which go on, hear of it later.
TEST_P(RunAheadTest, AFailureOfThisRankClosesItsGroup) {
  StreamedTraining training{StreamLayout{}};
  const std::optional<at::Tensor> buffer = this->buffer();
  int step = begin(training, buffer);
  bool throws = true;
  training.model().parameters()[2].register_hook([&](const at::Tensor&) {
    if (throws) throw std::runtime_error("no disk");
  });
  EXPECT_THROW(training.step(step), std::runtime_error);
  training.reducer().end_iteration();  // on whatever thread it is ending
  simulated::synchronize_all();
  throws = false;
  EXPECT_THAT(training.recording().statuses().back(),
              HasSubstr("failed in iteration 4"));
  expect_closed(training, "This rank failed in iteration 4");
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

// So that no bad step is evaluated.
TEST_F(UnwatchedRunAheadTest, AForwardUnderNoGradAwaitsStatuses) {
  RecordingGroup recording(testing::kWorldSize);
  Weighted module;
  DistributedDataParallel model(module, recording.group());
  const at::Tensor x = at::ones({3}, simulated::on_device());
  const auto evaluate = [&] {
    const at::NoGradGuard no_grad;
    model(x);
  };
  recording.answer_statuses_with([](const RankStatus& own) {
    std::vector<RankStatus> by_rank(testing::kWorldSize, own);
    if (own.kind == StatusKind::kEnd && own.iteration == 4) {
      by_rank[1].kind = StatusKind::kFailed;
    }
    return by_rank;
  });
  for (int step = 0; step < 4; ++step) {
    evaluate();
    model(x).backward();
  }
  EXPECT_THAT(text_of<c10::DistBackendError>(evaluate),
              HasSubstr("rank 1 failed in iteration 4"));
}

// ---- Ranks with devices of their own.

class OneRank {
 public:
  OneRank(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int rank,
          int max_ahead)
      : weights_({weight_on(rank, 3), weight_on(rank, 5)}),
        reducer_(weights_, group,
                 {.bucket_plan = {{1}, {0}},
                  .rebuild_buckets = false,
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
    // A host of these waits for its peers where it delivers: what comes after
    // the failure would be waited for in vain.
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
        },
        testing::Waiting::kApart);
  }
}

TEST_F(UnwatchedRunAheadTest, AWorldOfOneGoesOnAfterAFailure) {
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
