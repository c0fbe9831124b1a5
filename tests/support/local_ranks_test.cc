#include "brigade/tests/support/local_ranks.h"

#include <torch/torch.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <vector>

#include "gtest/gtest.h"

namespace brigade::testing {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(LocalRanksTest, EveryRankRunsOnce) {
  std::mutex mutex;
  std::multiset<int> ranks;
  run_ranks(3, [&](Group group) {
    std::lock_guard<std::mutex> lock(mutex);
    ranks.insert(group->getRank());
  });
  EXPECT_EQ(ranks, (std::multiset<int>{0, 1, 2}));
}

TEST(LocalRanksTest, RethrowsTheFailureOfTheLowestRank) {
  EXPECT_THROW(run_ranks(3,
                         [](Group group) {
                           if (group->getRank() == 1) {
                             throw std::domain_error("x");
                           }
                           if (group->getRank() == 2) {
                             throw std::length_error("y");
                           }
                         }),
               std::domain_error);
}

TEST(LocalRanksTest, ARankThatNeverArrivesFailsTheOthersInTime) {
  EXPECT_ANY_THROW(run_ranks(
      2,
      [](Group group) {
        if (group->getRank() == 1) {
          // Stays, connected, for longer than the timeout of the other.
          group->getStore()->wait({"rank 0 has given up"},
                                  std::chrono::minutes(1));
          return;
        }
        std::vector<at::Tensor> x = {at::ones(1)};
        try {
          group->allreduce(x)->wait();
        } catch (...) {
          group->getStore()->set("rank 0 has given up", "");
          throw;
        }
      },
      std::chrono::milliseconds(500)));
}

}  // namespace
}  // namespace brigade::testing
