// Statuses of a reducer, and the program's collectives between its launches.

#include "brigade/reducer/peer_status.h"

#include <torch/torch.h>

#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "gtest/gtest.h"

namespace brigade {
namespace peer_status_test {

using enum StatusKind;
using testing::run_ranks;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

void all_reduce(const Group& group) {
  std::vector<at::Tensor> tensors = {at::ones(4)};
  group->allreduce(tensors)->wait();
}

StatusComparison exchange(PeerStatus& peers, const RankStatus& own) {
  return peers.await(peers.send(own, /*ends_iteration=*/true));
}

// Runs an iteration with one launch before `between` and one after it.
StatusComparison iterate(PeerStatus& peers, const Group& group, auto between) {
  peers.backward_begins();
  peers.count([&] { all_reduce(group); });
  between();
  peers.count([&] { all_reduce(group); });
  return exchange(peers, {.kind = kEnd});
}

TEST(PeerStatusTest, OtherCollectivesOutsideOfBackwardDoNotMatter) {
  run_ranks(2, [](const Group& group) {
    PeerStatus peers(group);
    peers.connect();
    for (int i = 0; i < 3; ++i) {
      all_reduce(group);
      const StatusComparison found = iterate(peers, group, [] {});
      EXPECT_TRUE(found.status.ok());
      EXPECT_EQ(found.by_rank.front().has_others, 0);
    }
  });
}
// For hooks whose continuations may launch collectives.
TEST(PeerStatusTest, OtherCollectivesAtDifferentPlacesAreAnErrorIfCompared) {
  for (const bool compares : {false, true}) {
    run_ranks(2, [&](const Group& group) {
      PeerStatus peers(group);
      peers.connect();
      peers.compare_others(compares);
      peers.backward_begins();
      peers.count([&] { all_reduce(group); });
      if (group->getRank() == 0) all_reduce(group);
      peers.count([&] { all_reduce(group); });
      if (group->getRank() == 1) all_reduce(group);
      const StatusComparison found = exchange(peers, {.kind = kEnd});
      EXPECT_EQ(found.status.ok(), !compares);
      EXPECT_EQ(found.must_close, compares);
    });
  }
}
}  // namespace peer_status_test
}  // namespace brigade
