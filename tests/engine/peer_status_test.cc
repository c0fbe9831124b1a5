// What ranks tell each other of what they have launched on their groups, and
// what follows from what other collectives these have counted.

#include "brigade/engine/state/peer_status.h"

#include <torch/torch.h>

#include <string>
#include <vector>

#include "brigade/comm/process_group.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using enum StatusKind;
using ::testing::HasSubstr;
using testing::make_subgroup;
using testing::run_ranks;
using ::testing::StartsWith;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Groups = std::vector<Group>;
using Work = c10::intrusive_ptr<c10d::Work>;

Work all_reduce(const Group& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  return group->allreduce(tensors);
}

StatusComparison exchange(PeerStatus& peers, const RankStatus& own) {
  return peers.await(peers.begin_exchange(own));
}

// One iteration as a reducer runs it: all-reduces of different lengths, and an
// exchange at the end. Ranks that have launched less launch zeros.
TEST(PeerStatusTest, BehindADeficitTheGroupIsUsable) {
  const std::vector<int64_t> lengths = {1 << 16, 3, 1 << 10};
  std::vector<std::string> texts(3);
  run_ranks(3, [&](const Group& group) {
    const int rank = group->getRank();
    PeerStatus peers(Groups{group}, /*has_channel=*/true);
    peers.connect();
    std::vector<Work> works;
    const auto all_reduce_next = [&](double value) {
      works.push_back(
          all_reduce(group, at::full({lengths[works.size()]}, value)));
    };
    const auto launch_next = [&] {
      peers.on(0).count([&] { all_reduce_next(1); });
    };
    launch_next();
    if (rank != 1) launch_next();
    if (rank == 2) launch_next();
    const StatusComparison comparison =
        exchange(peers, {.kind = rank == 2 ? kEnd : kFailed,
                         .iteration = 7,
                         .unit = rank == 2 ? -1 : 2 - rank,
                         .text = status_text(rank == 2 ? "" : "bad input")});
    texts[rank] = std::string(comparison.status.message());
    const int32_t deficit = (*comparison.deficit)[0];
    EXPECT_EQ(deficit, std::vector<int32_t>({1, 2, 0})[rank]);
    for (int32_t i = 0; i < deficit; ++i) all_reduce_next(0);
    for (const Work& work : works) work->wait();
    peers.restart_counts();

    // All are counted from where all stood.
    const at::Tensor next = at::full(5, rank + 1.0);
    peers.on(0).count([&] { all_reduce(group, next)->wait(); });
    EXPECT_TRUE(next.equal(at::full(5, 6.0)));
    const PendingExchange pending = peers.begin_exchange({.kind = kEnd});
    EXPECT_EQ(pending.own.by_group[0].launches, 1);
    EXPECT_EQ(pending.own.by_group[0].foreign, 0);
    EXPECT_TRUE(peers.await(pending).status.ok());
  });
  EXPECT_EQ(texts[0],
            "rank 0 failed in iteration 7 at launch 2: bad input\n"
            "rank 1 failed in iteration 7 at launch 1: bad input");
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
}

TEST(PeerStatusTest, ACollectiveOfTheUsersInBetweenIsNoticed) {
  run_ranks(2, [](const Group& group) {
    PeerStatus peers(Groups{group}, /*has_channel=*/true);
    peers.connect();
    std::vector<Work> works;
    const auto launch = [&] {
      works.push_back(all_reduce(group, at::ones(4)));
    };
    peers.on(0).count(launch);
    if (group->getRank() == 0) {
      launch();  // the user's
      peers.on(0).count(launch);
    }
    const PendingExchange pending =
        peers.begin_exchange({.kind = group->getRank() == 0 ? kEnd : kFailed});
    EXPECT_EQ(pending.own.by_group[0].foreign, group->getRank() == 0 ? 1 : 0);
    EXPECT_THAT(
        std::string(peers.await(pending).deficit.status().message()),
        StartsWith("ranks can't be brought in step: behind by 0, 1 launches"));
    while (works.size() < 3) launch();  // all have the same length here
    for (const Work& work : works) work->wait();
  });
}

// A send counts where it starts and a receive where it ends: what one interval
// has more, no later one has less.
TEST(PeerStatusTest, AnUnevenIntervalDoesNotSpoilTheNext) {
  run_ranks(2, [](const Group& group) {
    PeerStatus peers(Groups{group}, /*has_channel=*/true);
    peers.connect();
    if (group->getRank() == 0) {
      std::vector<at::Tensor> sent = {at::ones(4)};
      for (int i = 0; i < 3; ++i) group->send(sent, 1, i)->wait();
    } else {
      std::vector<at::Tensor> received = {at::ones(4)};
      for (int i = 0; i < 3; ++i) group->recv(received, 0, i)->wait();
    }
    exchange(peers, {.kind = kEnd});
    for (int interval = 0; interval < 2; ++interval) {
      all_reduce(group, at::ones(4))->wait();
      const PendingExchange pending = peers.begin_exchange({.kind = kEnd});
      EXPECT_EQ(pending.own.by_group[0].foreign, 1);
      EXPECT_TRUE(peers.await(pending).status.ok());
    }
  });
}

TEST(PeerStatusTest, TellsOfEachGroup) {
  run_ranks(2, [](const Group& group) {
    const GroupScope second(make_subgroup(group, "second", {0, 1}));
    PeerStatus peers(Groups{group, second.group()}, /*has_channel=*/true);
    peers.connect();
    std::vector<Work> works;
    const auto launch_on = [&](const Group& on) {
      works.push_back(all_reduce(on, at::ones(4)));
    };
    peers.on(0).count([&] { launch_on(group); });
    peers.on(1).count([&] { launch_on(second.group()); });
    launch_on(second.group());  // the user's, on all ranks
    if (group->getRank() == 0) {
      peers.on(1).count([&] { launch_on(second.group()); });
    }
    const PendingExchange pending = peers.begin_exchange({.kind = kEnd});
    EXPECT_EQ(pending.own.by_group[0].launches, 1);
    EXPECT_EQ(pending.own.by_group[0].foreign, 0);
    EXPECT_EQ(pending.own.by_group[1].launches, group->getRank() == 0 ? 2 : 1);
    EXPECT_EQ(pending.own.by_group[1].foreign, 1);
    const StatusComparison comparison = peers.await(pending);
    EXPECT_THAT(std::string(comparison.status.message()),
                HasSubstr("rank 0 has 2, rank 1 has 1 on group 1"));
    EXPECT_EQ((*comparison.deficit)[0], 0);
    EXPECT_EQ((*comparison.deficit)[1], group->getRank());
    if (group->getRank() == 1) launch_on(second.group());
    for (const Work& work : works) work->wait();
  });
}

TEST(PeerStatusTest, MoreGroupsThanAStatusHoldsAreAnError) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  EXPECT_THROW(PeerStatus(Groups(kMaxGroups + 1, group), true),
               c10::ValueError);
}

}  // namespace
}  // namespace brigade
