// Statuses of engines, and the collectives that a group launches beside theirs.

#include "brigade/reducer/peer_status.h"

#include <torch/torch.h>

#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace peer_status_test {

using enum StatusKind;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

void all_reduce(const Group& group) {
  std::vector<at::Tensor> tensors = {at::ones(4)};
  group->allreduce(tensors)->wait();
}

StatusComparison exchange(PeerStatus& peers, const RankStatus& own) {
  return peers.await(peers.send(own, /*ends_iteration=*/true));
}

// One iteration with a launch of the engine's before and after `between`.
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

TEST(PeerStatusTest, OthersInABackwardAreTold) {
  run_ranks(2, [](const Group& group) {
    PeerStatus peers(group);
    peers.connect();
    for (const bool has_others : {true, false}) {
      const StatusComparison found = iterate(peers, group, [&] {
        if (has_others) all_reduce(group);
      });
      EXPECT_TRUE(found.status.ok());
      EXPECT_EQ(found.by_rank.back().has_others, has_others);
    }
  });
}

// Of hooks that may launch some when others are complete.
TEST(PeerStatusTest, OthersAtDifferentPlacesAreAnErrorWhereTheyAreCompared) {
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

TEST(PeerStatusTest, ALaunchThatThrowsAfterACollectiveCanNotContinue) {
  run_ranks(2, [](const Group& group) {
    PeerStatus peers(group);
    peers.connect();
    peers.backward_begins();
    const bool fails = group->getRank() == 1;
    const auto launch = [&] {
      all_reduce(group);
      if (fails) throw std::runtime_error("as scripted");
    };
    if (fails) {
      EXPECT_THROW(peers.count(launch), std::runtime_error);
    } else {
      peers.count(launch);
    }
    EXPECT_EQ(peers.can_continue(), !fails);
    const StatusComparison found =
        exchange(peers, {.kind = fails ? kFailed : kEnd});
    EXPECT_TRUE(found.must_close);
  });
}

TEST(PeerStatusTest, AClosedGroupIsAnErrorThatSaysWhy) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  PeerStatus peers(group);
  peers.require_open();
  peers.note_closed("rank 1 has left");
  peers.note_closed("later");
  EXPECT_TRUE(peers.is_closed());
  EXPECT_THAT([&] { peers.require_open(); },
              ThrowsMessage<c10::DistBackendError>(
                  HasSubstr("rank 1 has left\nMake a new process group")));
}

}  // namespace peer_status_test
}  // namespace brigade
