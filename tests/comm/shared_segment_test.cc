// Shared memory of the ranks on a host, and waits in it.

#include "brigade/comm/group/shared_segment.h"

#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "brigade/tests/support/process_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace shared_segment_test {

using std::chrono::steady_clock;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using testing::ProcessRanks;
using testing::RankContext;
using testing::RankFunction;
using testing::RankResult;
using testing::run_ranks;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr auto kForEver = steady_clock::time_point::max();

std::atomic<int>& number_of(const SharedSegment& segment, int rank) {
  return *reinterpret_cast<std::atomic<int>*>(segment.region(rank));
}

bool wait_for_number(SharedSegment& segment, int rank, int number,
                     SharedSegment::Deadline deadline = kForEver) {
  return segment.wait_for(rank, deadline,
                          [&] { return number_of(segment, rank) >= number; });
}

std::string error_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (...) {
    return message_of(std::current_exception());
  }
  return "no error";
}

TEST(SharedSegmentTest, RanksSeeEachOthersRegions) {
  run_ranks(3, [](const Group& group) {
    const auto segment = SharedSegment::make(group, 100);
    ASSERT_NE(segment, nullptr);
    const int rank = group->getRank();
    EXPECT_EQ(segment->rank(), rank);
    EXPECT_EQ(segment->size(), 3);
    for (int round = 1; round <= 1000; ++round) {
      number_of(*segment, rank) = round;
      segment->notify();
      for (int peer = 0; peer < 3; ++peer) {
        EXPECT_TRUE(wait_for_number(*segment, peer, round));
        EXPECT_TRUE(segment->is_alive(peer));
      }
    }
    EXPECT_EQ(segment->region(rank)[99], std::byte{0});
    group->barrier()->wait();
  });
}

TEST(SharedSegmentTest, IsNullUnlessAllRanksAreOnOneHost) {
  run_ranks(3, [](const Group& group) {
    const int64_t host = SharedSegment::host();
    const bool is_last = group->getRank() == 2;
    EXPECT_NE(host, 0);
    EXPECT_EQ(SharedSegment::make(group, 64, is_last ? host + 1 : host),
              nullptr);
    EXPECT_EQ(SharedSegment::make(group, 64, is_last ? 0 : host), nullptr);
    EXPECT_NE(SharedSegment::make(group, 64, 5), nullptr);
  });
  EXPECT_EQ(SharedSegment::make(single_process_group(), 64), nullptr);
}

TEST(SharedSegmentTest, AWaitReturnsFalseAtItsDeadline) {
  run_ranks(2, [](const Group& group) {
    const auto segment = SharedSegment::make(group, 64);
    EXPECT_FALSE(wait_for_number(*segment, 1, 1, steady_clock::now()));
    EXPECT_FALSE(wait_for_number(
        *segment, 0, 1, steady_clock::now() + std::chrono::milliseconds(5)));
    group->barrier()->wait();
  });
}

TEST(SharedSegmentTest, AWaitFailsIfTheRankHasLeft) {
  run_ranks(3, [](const Group& group) {
    auto segment = SharedSegment::make(group, 64);
    if (group->getRank() == 1) {
      number_of(*segment, 1) = 1;
      segment.reset();
      group->barrier()->wait();
      return;
    }
    EXPECT_EQ(error_of([&] { wait_for_number(*segment, 1, 2); }),
              "rank 1 has left");
    EXPECT_TRUE(wait_for_number(*segment, 1, 1));
    EXPECT_FALSE(segment->is_alive(1));
    EXPECT_FALSE(segment->is_closed());
    // A wait on the own region is a wait for any peer.
    EXPECT_EQ(error_of([&] { wait_for_number(*segment, group->getRank(), 1); }),
              "rank 1 has left");
    group->barrier()->wait();  // the others leave after this
  });
}

TEST(SharedSegmentTest, AllRanksReportTheFirstReason) {
  run_ranks(3, [](const Group& group) {
    const auto segment = SharedSegment::make(group, 64);
    if (group->getRank() == 2) {
      segment->close("the first reason");
      segment->close("the second reason");
    }
    EXPECT_EQ(error_of([&] { wait_for_number(*segment, 0, 1); }),
              "the first reason");
    EXPECT_TRUE(segment->is_closed());
    EXPECT_EQ(segment->close_reason(), "the first reason");
    EXPECT_EQ(segment->lost_rank(), -1);
    group->barrier()->wait();
  });
}

// Rank 1 is killed while ranks 0 and 2 wait for each other, and 1 for itself.
const RankFunction kWaitForTheDead("wait_for_the_dead", [](RankContext& rank) {
  GroupScope scope(init_process_group({.timeout = std::chrono::minutes(10)}));
  const auto segment = SharedSegment::make(scope.group(), 64);
  rank.report("waiting");
  const std::string error =
      error_of([&] { wait_for_number(*segment, 2 - rank.rank(), 1); });
  rank.report(error + " lost " + std::to_string(segment->lost_rank()));
});

TEST(SharedSegmentTest, NamesADeadRank) {
  ProcessRanks ranks({.world_size = 3, .function = "wait_for_the_dead"});
  ranks.wait_for_all("waiting");
  ranks.signal(1, SIGKILL);
  const std::vector<RankResult> results = ranks.finish();
  for (const int rank : {0, 2}) {
    EXPECT_THAT(results[rank].messages,
                Contains(AllOf(HasSubstr("rank 1 (process "),
                               HasSubstr(") has ended lost 1"))))
        << results[rank].error_output;
  }
}

TEST(SharedSegmentTest, AForkedChildDoesNotCountAsARank) {
  run_ranks(2, [](const Group& group) {
    auto segment = SharedSegment::make(group, 64);
    const pid_t child = fork();
    if (child == 0) {
      segment.reset();
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_TRUE(segment->is_alive(0));
    EXPECT_TRUE(segment->is_alive(1));
    group->barrier()->wait();
  });
}

}  // namespace shared_segment_test
}  // namespace brigade
