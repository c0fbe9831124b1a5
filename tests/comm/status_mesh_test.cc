// What a mesh costs, counted, and what it does while its ranks are busy: ranks
// are threads, the connections are real.

#include "brigade/comm/control/status_mesh.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <utility>
#include <vector>

#include "brigade/comm/control/connect_peers.h"
#include "brigade/comm/control/control_channel.h"
#include "brigade/comm/control/exchange_rounds.h"
#include "brigade/comm/control/tcp_links.h"
#include "brigade/comm/errors/peer_error.h"
#include "brigade/comm/group/channel_identity.h"
#include "brigade/tests/comm/world_sizes.h"
#include "brigade/tests/support/counting_store.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace status_mesh_test {

using enum StatusKind;
using enum StatusExchange::Outcome;
using testing::CountingStore;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::world_sizes;

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr std::chrono::milliseconds kNever = std::chrono::minutes(10);

// Ranks of groups that have a store, and no backend.
void run_ranks(int size, const std::function<void(Group, CountingStore&)>& fn) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([=, &fn] {
      const auto store = c10::make_intrusive<CountingStore>(shared);
      fn(c10::make_intrusive<c10d::ProcessGroup>(store, rank, size), *store);
    });
  }
}

class StatusMeshTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, StatusMeshTest,
                         ::testing::ValuesIn(world_sizes()));

// As many as a large job has.
class StatusMeshCostTest : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, StatusMeshCostTest,
                         ::testing::ValuesIn(world_sizes()));
#if defined(__SANITIZE_THREAD__)
// 512 threads take six minutes there.
INSTANTIATE_TEST_SUITE_P(ManyRanks, StatusMeshCostTest, ::testing::Values(128));
#else
INSTANTIATE_TEST_SUITE_P(ManyRanks, StatusMeshCostTest,
                         ::testing::Values(128, 256, 512));
#endif

// False if this process may not have so many.
bool may_open_files(rlim_t number) {
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return false;
  if (files.rlim_cur >= number) return true;
  files.rlim_cur = std::min(number, files.rlim_max);
  return files.rlim_cur >= number && setrlimit(RLIMIT_NOFILE, &files) == 0;
}

TEST_P(StatusMeshCostTest, FewConnectionsMessagesAndKeys) {
  const int size = GetParam();
  // Both ends of a connection are of this process.
  if (!may_open_files(size * (2 * num_rounds(size) + 8))) {
    GTEST_SKIP() << "this process may not open enough files for " << size
                 << " ranks (ulimit -n)";
  }
  const int rounds = num_rounds(size);
  const double limit = 2 * std::log2(size) + 2;
  std::latch connected(size);
  std::latch agreed(size);
  std::latch done(size);
  run_ranks(size, [&](const Group& group, CountingStore& store) {
    const std::shared_ptr<StatusMesh> mesh = StatusMesh::of(group);
    EXPECT_EQ(mesh->traffic().connections,
              neighbours_of(group->getRank(), size).size());
    EXPECT_LE(mesh->traffic().connections, limit);
    // Of the mesh's number, this rank's own address, and the neighbours'.
    EXPECT_EQ(store.num_keys(), 2 + mesh->traffic().connections);
    EXPECT_EQ(mesh->traffic().messages_sent, rounds);  // the hello
    connected.arrive_and_wait();

    mesh->begin(2, {.kind = kEnd, .sequence = 1})->wait(kNever);
    EXPECT_EQ(mesh->traffic().messages_sent, 2 * rounds);
    EXPECT_EQ(mesh->traffic().messages_received, 2 * rounds);
    agreed.arrive_and_wait();

    const auto different = mesh->begin(
        2, {.kind = kEnd, .sequence = 2, .iteration = group->getRank()});
    different->wait(kNever);
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(different->received()[rank].iteration, rank);
    }
    EXPECT_EQ(mesh->traffic().messages_sent - 2 * rounds, 2 * rounds - 1);
    EXPECT_LE(mesh->traffic().messages_sent - 2 * rounds, limit);
    done.arrive_and_wait();
  });
}

// Once they have called exchange(): nobody waits for what a rank computes then.
TEST_P(StatusMeshTest, ExchangesGoOnWhileRanksCompute) {
  const int size = GetParam();
  for (const int rank_that_waits : {0, size - 1}) {
    std::latch over(1);
    run_ranks(size, [&](const Group& group, CountingStore&) {
      ControlChannel channel(group);
      const int rank = group->getRank();
      const PendingExchange equal = channel.exchange({.iteration = 7});
      const PendingExchange different = channel.exchange({.iteration = rank});
      if (rank != rank_that_waits) return over.wait();
      EXPECT_FALSE(channel.await_difference(equal).has_value());
      const auto by_rank = channel.await_difference(different);
      ASSERT_TRUE(by_rank.has_value());
      EXPECT_EQ(by_rank->back().iteration, size - 1);
      over.count_down();
    });
  }
}

TEST_P(StatusMeshTest, EveryRankIsToldWhichHasLeft) {
  const int size = GetParam();
  std::latch over(size);
  run_ranks(size, [&](const Group& group, CountingStore&) {
    auto channel = std::make_unique<ControlChannel>(group);
    channel->await(channel->exchange({.iteration = 7}));
    if (group->getRank() == 1) {
      channel = nullptr;
    } else {
      try {
        channel->await(channel->exchange({.iteration = 8}));
        ADD_FAILURE() << "no error";
      } catch (const PeerError& error) {
        EXPECT_THAT(error.what_without_backtrace(),
                    HasSubstr("rank 1 has left after iteration 7: nobody"));
      }
    }
    over.arrive_and_wait();
  });
}

// Links of a mesh without a group.
std::unique_ptr<PeerLinks> connect(const c10::intrusive_ptr<c10d::Store>& store,
                                   int rank, int size) {
  return std::make_unique<TcpLinks>(
      connect_peers(store,
                    {.rank = rank,
                     .peers = neighbours_of(rank, size),
                     .address = "127.0.0.1"},
                    kNever));
}

// As the end of a process does.  Only one rank is waiting by then.
TEST_P(StatusMeshTest, AnEndOfConnectionsReachesThoseThatAreNotConnected) {
  const int size = GetParam();
  const int waiting = size / 2;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::latch has_ended(1);
  std::latch over(1);
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      auto mesh = std::make_unique<StatusMesh>("", rank, size,
                                               connect(store, rank, size));
      mesh->say_hello(kNever);
      mesh->begin(2, {.sequence = 1})->wait(kNever);
      if (rank == 0) {
        mesh = nullptr;
        has_ended.count_down();
      } else if (rank == waiting) {
        const auto exchange = mesh->begin(2, {.sequence = 2});
        EXPECT_EQ(exchange->wait_for_outcome(kNever), kBroken);
        ASSERT_EQ(exchange->absences().size(), 1);
        EXPECT_EQ(exchange->absences()[0].rank, 0);
        EXPECT_EQ(exchange->absences()[0].reason, AbsenceReason::kClosed);
        has_ended.wait();
        over.count_down();
      }
      over.wait();
    });
  }
}

TEST(ChannelIdentityTest, IdentitiesOfOneGroupDiffer) {
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  std::set<uint64_t> numbers = {kHelloChannel};
  for (int i = 0; i < 10; ++i) {
    numbers.insert(ChannelIdentity::made_together(group).number());
    numbers.insert(ChannelIdentity::made_alone(group).number());
  }
  EXPECT_EQ(numbers.size(), 21);
}

// As a copy of a model on one rank is.
TEST(ChannelIdentityTest, WhatOneRankMakesAloneDoesNotShiftTheOthers) {
  const auto rank_0 = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  const auto rank_1 = c10::make_intrusive<c10d::ProcessGroup>(1, 2);
  ChannelIdentity::made_alone(rank_0);
  EXPECT_EQ(ChannelIdentity::made_together(rank_0).number(),
            ChannelIdentity::made_together(rank_1).number());
}

// Two engines that connect when they are used first, which is in another order
// on the other rank.
TEST(StatusMeshTest, ChannelsMeetByIdentityInWhateverOrderTheyConnect) {
  run_ranks(2, [](const Group& group, CountingStore&) {
    const auto student = ChannelIdentity::made_alone(group);
    const auto teacher = ChannelIdentity::made_alone(group);
    const auto meet = [&](ChannelIdentity identity, int64_t iteration) {
      auto channel = std::make_unique<ControlChannel>(group, identity);
      auto pending = channel->exchange({.iteration = iteration});
      return std::pair(std::move(channel), std::move(pending));
    };
    const bool in_order = group->getRank() == 0;
    auto first = in_order ? meet(student, 7) : meet(teacher, 8);
    auto second = in_order ? meet(teacher, 8) : meet(student, 7);
    EXPECT_NE(first.first->store_prefix(), second.first->store_prefix());
    EXPECT_FALSE(first.first->await_difference(first.second).has_value());
    EXPECT_FALSE(second.first->await_difference(second.second).has_value());
  });
}

TEST(ConnectPeersTest, LoopbackConnectsToWhatIsElsewhere) {
  EXPECT_TRUE(connects(0, "10.0.0.1", 1, "10.0.0.2"));
  EXPECT_FALSE(connects(1, "10.0.0.2", 0, "10.0.0.1"));
  EXPECT_TRUE(connects(0, "127.0.0.1", 1, "127.0.0.1"));
  EXPECT_TRUE(connects(3, "127.0.0.1", 1, "10.0.0.1"));
  EXPECT_FALSE(connects(1, "10.0.0.1", 3, "127.0.0.1"));
}

OwnedSocket connected_to_port(int port) {
  OwnedSocket socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<sockaddr*>(&address),
                      sizeof(address)),
            0);
  return socket;
}

// Which say nothing, or the wrong thing.
TEST(ConnectPeersTest, StrangersAreTurnedAway) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto connect_rank = [&](int rank) {
    return connect_peers(
        store, {.rank = rank, .peers = {1 - rank}, .address = "127.0.0.1"},
        kNever);
  };
  std::map<int, OwnedSocket> of_rank_1;
  std::jthread acceptor([&] { of_rank_1 = connect_rank(1); });
  const std::string listens = store->get_to_str("listens/1");
  const auto port = std::stoi(listens.substr(listens.find(' ') + 1));
  std::vector<OwnedSocket> strangers;
  for (const std::string& words : {std::string(), std::string(16, '\0')}) {
    strangers.push_back(connected_to_port(port));
    EXPECT_EQ(send(strangers.back().get(), words.data(), words.size(), 0),
              words.size());
  }
  const std::map<int, OwnedSocket> of_rank_0 = connect_rank(0);
  acceptor.join();
  EXPECT_EQ(of_rank_0.size(), 1);
  ASSERT_EQ(of_rank_1.size(), 1);
  const char sent = 'a';
  EXPECT_EQ(send(of_rank_0.at(1).get(), &sent, 1, 0), 1);
  char received = 0;
  while (recv(of_rank_1.at(0).get(), &received, 1, 0) != 1) {
    std::this_thread::yield();
  }
  EXPECT_EQ(received, sent);
}

TEST(ConnectPeersTest, APeerThatDoesNotComeIsNamed) {
  const c10::intrusive_ptr<c10d::Store> store =
      c10::make_intrusive<c10d::HashStore>();
  store->set("listens/0", "127.0.0.1 9 1");  // and never connects
  try {
    connect_peers(store, {.rank = 1, .peers = {0}, .address = "127.0.0.1"},
                  std::chrono::milliseconds(20));
    ADD_FAILURE() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what_without_backtrace(),
                HasSubstr("rank 0 did not connect to 127.0.0.1 port"));
  }
}

}  // namespace status_mesh_test
}  // namespace brigade
