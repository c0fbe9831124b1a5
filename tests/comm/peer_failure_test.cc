// A peer that dies or hangs in the middle of a collective, with real processes.

#include <signal.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "brigade/comm/errors/liveness_probe.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using ::testing::StartsWith;

// All-reduces until it fails, and reports what it then knows.  Arguments: the
// group's timeout in ms.
const RankFunction kReduceForever("reduce_forever", [](RankContext& rank) {
  const std::chrono::milliseconds timeout(std::stoll(rank.arguments().at(0)));
  GroupScope scope(init_process_group({.timeout = timeout}));
  const auto& group = scope.group();
  at::Tensor weights = at::ones(4);
  for (int64_t iteration = 0;; ++iteration) {
    std::vector<at::Tensor> gradients = {at::ones(16)};
    try {
      group->allreduce(gradients)->wait();
    } catch (...) {
      group->abort();
      const LivenessProbe probe =
          probe_liveness(group, "failed", iteration, std::chrono::seconds(5));
      try {
        throw_peer_error(c10::str("rank ", rank.rank(), ", bucket 0"),
                         std::current_exception(), &probe);
      } catch (const c10::DistBackendError& error) {
        rank.report(std::string("error ") + error.what_without_backtrace());
      }
      rank.report("weights " + std::to_string(weights.sum().item<int>()));
      return;
    }
    if (iteration == 0) rank.report("running");
  }
});

class PeerFailureTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, PeerFailureTest, ::testing::Values(2, 3));

TEST_P(PeerFailureTest, EverySurvivorOfAKilledPeerSaysWhoIsMissing) {
  const int victim = 1;
  ProcessRanks ranks({.world_size = GetParam(),
                      .function = "reduce_forever",
                      .arguments = {"600000"}});
  ranks.wait_for_all("running");
  ranks.signal(victim, SIGKILL);
  const std::vector<RankResult> results = ranks.finish();
  EXPECT_EQ(results[victim].signal, SIGKILL);
  for (int rank = 0; rank < GetParam(); ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(results[rank].exit_code, 0) << results[rank].error_output;
    EXPECT_THAT(
        results[rank].messages,
        Contains(AllOf(
            StartsWith("error rank " + std::to_string(rank) + ", bucket 0: "),
            ContainsRegex("ranks? 0(, 2)? answered a liveness probe, rank "
                          "1 did not within 5 s\\."))));
    EXPECT_THAT(results[rank].messages, Contains("weights 4"));
  }
}

TEST(PeerFailureTest, AStoppedPeerFailsTheOthersAtTheTimeout) {
  ProcessRanks ranks(
      {.world_size = 2, .function = "reduce_forever", .arguments = {"1000"}});
  ranks.wait_for_all("running");
  ranks.signal(1, SIGSTOP);
  ranks.wait_for(0, "weights 4");
  ranks.signal(1, SIGKILL);
  const std::vector<RankResult> results = ranks.finish();
  EXPECT_EQ(results[0].exit_code, 0) << results[0].error_output;
  EXPECT_THAT(results[0].messages,
              Contains(AllOf(HasSubstr("rank 0, bucket 0: "),
                             HasSubstr("rank 1 did not within 5 s"))));
}

const RankFunction kThrowInFlight("throw_in_flight", [](RankContext& rank) {
  GroupScope scope(init_process_group());
  std::vector<at::Tensor> tensors = {at::ones(8)};
  auto work = scope.group()->allreduce(tensors);
  if (rank.rank() == 0) {
    work->wait();
    auto unanswered = scope.group()->allreduce(tensors);
    throw std::domain_error("a mistake on rank 0");
  }
  work->wait();
  std::vector<at::Tensor> other = {at::ones(8)};
  scope.group()->broadcast(other, {.rootRank = 0})->wait();
});

// With a timeout of 30 minutes, only an abort ends this before the deadline.
TEST(PeerFailureTest, AnExceptionOnOneRankEndsAllProcesses) {
  ProcessRanks ranks({.world_size = 2, .function = "throw_in_flight"});
  const std::vector<RankResult> results = ranks.finish();
  EXPECT_EQ(results[0].exit_code, 1);
  EXPECT_EQ(results[0].error_output, "rank 0: a mistake on rank 0\n");
  EXPECT_EQ(results[1].exit_code, 1);
  EXPECT_FALSE(results[0].timed_out || results[1].timed_out);
}

}  // namespace
}  // namespace brigade
