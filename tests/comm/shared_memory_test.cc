// Memory that processes share, what they wait on there, and posts in it.

#include "brigade/comm/ordered/shared_memory.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "brigade/comm/ordered/host_messages.h"
#include "brigade/comm/ordered/host_outbox.h"
#include "brigade/comm/ordered/shared_signal.h"
#include "brigade/tests/support/local_ranks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace shared_memory_test {

using std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

constexpr auto kForEver = steady_clock::time_point::max();

SharedMemory make_memory(size_t bytes) {
  auto memory = SharedMemory::make(bytes);
  TORCH_CHECK(memory, "this system shares no memory");
  return std::move(*memory);
}

TEST(SharedMemoryTest, AnotherProcessWritesToIt) {
  const SharedMemory memory = make_memory(100);
  EXPECT_EQ(std::accumulate(memory.data(), memory.data() + 100, 0,
                            [](int sum, std::byte byte) {
                              return sum + std::to_integer<int>(byte);
                            }),
            0);
  const pid_t child = fork();
  if (child == 0) {
    const auto mapped = SharedMemory::map(memory.address());
    if (mapped) mapped->data()[99] = std::byte{7};
    _exit(mapped ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory.data()[99], std::byte{7});
}

TEST(SharedMemoryTest, IsMappedByWhatItsMakerSaysOnly) {
  SharedMemory memory = make_memory(100);
  const SharedMemory::Address address = memory.address();
  EXPECT_TRUE(SharedMemory::map(address));
  const auto map_changed = [&](const auto& change) {
    SharedMemory::Address changed = address;
    change(changed);
    return SharedMemory::map(changed).has_value();
  };
  using Address = SharedMemory::Address;
  EXPECT_FALSE(map_changed([](Address& a) { a.nonce[1] ^= 1; }));
  EXPECT_FALSE(map_changed([](Address& a) { a.host ^= 1; }));
  EXPECT_FALSE(map_changed([](Address& a) { a.bytes += 1; }));
  EXPECT_FALSE(map_changed([](Address& a) { a.process = 1; }));
  EXPECT_FALSE(map_changed([](Address& a) { a.descriptor = 0; }));
  EXPECT_FALSE(SharedMemory::map({}));
  memory.close_address();
  EXPECT_FALSE(SharedMemory::map(address));
  EXPECT_EQ(memory.size(), 100u);
}

TEST(SharedSignalTest, WaitsUntilItIsRaised) {
  SharedMemory memory = make_memory(sizeof(SharedSignal));
  auto& signal = *reinterpret_cast<SharedSignal*>(memory.data());
  const auto other = SharedMemory::map(memory.address());
  ASSERT_TRUE(other);
  auto& same = *reinterpret_cast<SharedSignal*>(other->data());
  const uint32_t seen = signal.count();
  std::thread raiser([&] { same.raise(); });
  while (signal.count() == seen) signal.wait(seen, kForEver);
  raiser.join();
  signal.wait(seen, kForEver);  // it was raised since
  signal.wait(signal.count(), steady_clock::now());
  EXPECT_EQ(signal.count(), seen + 1);
}

class HostOutboxTest : public ::testing::Test {
 protected:
  explicit HostOutboxTest(size_t room = 4096)
      : HostOutboxTest(make_memory(HostOutbox::bytes_with_room_for(room))) {}

  bool post(uint64_t number, const Bytes& bytes, int num_readers = 1) {
    const std::span<const std::byte> piece(bytes);
    return own_.post(key(number), number * 10, num_readers, {&piece, 1});
  }
  std::optional<Bytes> find(uint64_t number, size_t bytes) {
    const auto found = reader_.find(key(number));
    if (!found || found->data == nullptr) return std::nullopt;
    EXPECT_EQ(found->tag, number * 10);
    return Bytes(found->data, found->data + bytes);
  }
  static HostOutbox::Key key(uint64_t number) {
    return {.lane = 1, .number = number};
  }

 private:
  explicit HostOutboxTest(SharedMemory memory)
      : reader_(*SharedMemory::map(memory.address())),
        own_(std::move(memory)) {}

 protected:
  HostOutbox reader_;
  HostOutbox own_;
};

Bytes bytes_of(size_t size, int value) {
  return Bytes(size, static_cast<std::byte>(value));
}

TEST_F(HostOutboxTest, APostIsFoundByItsKey) {
  EXPECT_FALSE(reader_.find(key(1)));
  const Bytes first = bytes_of(10, 1);
  const Bytes second = bytes_of(100, 2);
  const std::span<const std::byte> pieces[] = {first, {}, second};
  EXPECT_TRUE(own_.post(key(1), 10, 1, pieces));
  Bytes both = first;
  both.insert(both.end(), second.begin(), second.end());
  EXPECT_EQ(find(1, 110), both);
  EXPECT_FALSE(reader_.find(key(2)));
  EXPECT_FALSE(reader_.find({.lane = 0, .number = 1}));
}

TEST_F(HostOutboxTest, ThereIsRoomAgainWhenAllHaveRead) {
  EXPECT_TRUE(post(1, bytes_of(4096, 1), /*num_readers=*/2));
  EXPECT_FALSE(post(2, bytes_of(1, 2)));
  ASSERT_TRUE(reader_.find(key(2)));
  EXPECT_EQ(reader_.find(key(2))->data, nullptr);
  reader_.release(key(1));
  EXPECT_FALSE(post(3, bytes_of(1, 3)));
  EXPECT_EQ(find(1, 4096), bytes_of(4096, 1));
  reader_.release(key(1));
  EXPECT_TRUE(post(4, bytes_of(4096, 4)));
  EXPECT_EQ(find(4, 4096), bytes_of(4096, 4));
}

TEST_F(HostOutboxTest, NothingTakesNoRoom) {
  EXPECT_TRUE(post(1, {}));
  EXPECT_TRUE(post(2, bytes_of(4096, 2)));
  EXPECT_TRUE(post(3, {}));
  EXPECT_EQ(find(2, 4096), bytes_of(4096, 2));
}

TEST_F(HostOutboxTest, APlaceIsFreeWhenItsPostIsRead) {
  EXPECT_TRUE(post(1, bytes_of(1, 1)));
  EXPECT_FALSE(own_.is_free(key(1025)));
  EXPECT_TRUE(own_.is_free(key(1026)));
  const uint32_t seen = own_.signal().count();
  reader_.release(key(1));
  EXPECT_TRUE(own_.is_free(key(1025)));
  EXPECT_EQ(own_.signal().count(), seen + 1);
}

// What is read is what was posted, however much is in flight.
TEST_F(HostOutboxTest, NoPostOverwritesAnother) {
  std::mt19937 random(1);
  std::vector<std::pair<uint64_t, size_t>> unread;
  int num_refused = 0;
  for (uint64_t number = 1; number <= 20000; ++number) {
    const size_t size = random() % 1200;
    const bool had_room =
        post(number, bytes_of(size, static_cast<int>(number % 251)));
    num_refused += had_room ? 0 : 1;
    unread.emplace_back(number, had_room ? size : 0);
    while (unread.size() > random() % 12) {
      const size_t i = random() % unread.size();
      const auto [read, bytes] = unread[i];
      if (bytes > 0) {
        ASSERT_EQ(find(read, bytes),
                  bytes_of(bytes, static_cast<int>(read % 251)));
      }
      reader_.release(key(read));
      unread.erase(unread.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  EXPECT_GT(num_refused, 100);
  EXPECT_LT(num_refused, 15000);
}

TEST(HostMessagesTest, RanksOfAHostReadEachOthers) {
  testing::run_ranks(
      3, [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        HostMessages messages(*group->getDefaultBackend(), 1 << 16);
        const int rank = group->getRank();
        const HostOutbox::Key key = {.lane = 0, .number = 1};
        const Bytes bytes = bytes_of(50, rank + 1);
        const std::span<const std::byte> piece(bytes);
        EXPECT_FALSE(messages.reaches(rank));
        EXPECT_TRUE(messages.joins_all());
        EXPECT_TRUE(messages.post(key, 5, {&piece, 1}, kForEver));
        for (int peer = 0; peer < 3; ++peer) {
          if (peer == rank) continue;
          ASSERT_TRUE(messages.reaches(peer));
          const HostOutbox::Post found = messages.await(peer, key, kForEver);
          EXPECT_EQ(found.tag, 5u);
          EXPECT_EQ(Bytes(found.data, found.data + 50), bytes_of(50, peer + 1));
          messages.release(peer, key);
        }
        group->barrier()->wait();  // what a rank that fails has posted is lost
        const HostOutbox::Key next = {.lane = 0, .number = 2};
        EXPECT_THROW(messages.await((rank + 1) % 3, next, steady_clock::now()),
                     c10::Error);
        std::thread aborter([&] { messages.abort(); });
        EXPECT_THROW(messages.await((rank + 1) % 3, next, kForEver),
                     c10::Error);
        aborter.join();
      });
}

TEST(HostMessagesTest, APeerThatHasLeftOrFailedIsNotWaitedFor) {
  std::promise<void> failed;
  const std::shared_future<void> has_failed = failed.get_future().share();
  testing::run_ranks(
      2, [&](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        const HostOutbox::Key first = {.lane = 0, .number = 1};
        const HostOutbox::Key second = {.lane = 0, .number = 2};
        const int peer = 1 - group->getRank();
        {
          HostMessages messages(*group->getDefaultBackend(), 1 << 16);
          if (group->getRank() == 0) {
            messages.post(first, 1, {}, kForEver);
          } else {  // what was posted is there behind the end
            EXPECT_THROW(messages.await(peer, second, kForEver), c10::Error);
            EXPECT_EQ(messages.await(peer, first, kForEver).tag, 1u);
          }
        }
        HostMessages messages(*group->getDefaultBackend(), 1 << 16);
        if (group->getRank() == 0) {
          messages.post(first, 1, {}, kForEver);
          messages.abort();
          failed.set_value();
        } else {
          has_failed.wait();
          EXPECT_THROW(messages.await(peer, first, kForEver), c10::Error);
        }
      });
}

TEST(HostMessagesTest, WithoutMemoryThereAreNoPeers) {
  testing::run_ranks(
      3, [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        HostMessages messages(*group->getDefaultBackend(),
                              group->getRank() == 1 ? 0 : 1 << 16);
        EXPECT_FALSE(messages.reaches(1));
        EXPECT_EQ(messages.has_peers(), group->getRank() != 1);
        EXPECT_FALSE(messages.joins_all());
      });
}

}  // namespace shared_memory_test
}  // namespace brigade
