#include "brigade/comm/control/tcp_links.h"

#include <sys/socket.h>

#include <array>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace brigade {
namespace {

using ::testing::ElementsAre;

// Keeps what comes, and lets a test wait for it.
class Mailbox : public LinkListener {
 public:
  void on_message(int from, Bytes message) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    messages_.emplace_back(message.begin(), message.end());
    changed_.notify_all();
  }
  void on_closed(int peer) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_.push_back(peer);
    changed_.notify_all();
  }

  std::vector<std::vector<std::byte>> wait_for_messages(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return messages_.size() >= count; });
    return messages_;
  }
  std::vector<int> wait_for_end() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !closed_.empty(); });
    return closed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<std::byte>> messages_;
  std::vector<int> closed_;
};

class TcpLinksTest : public ::testing::Test {
 protected:
  TcpLinksTest() {
    std::array<int, 2> ends = {};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
    links_of_0_ = links(/*peer=*/1, ends[0]);
    links_of_1_ = links(/*peer=*/0, ends[1]);
  }

  static std::unique_ptr<TcpLinks> links(int peer, int descriptor) {
    std::map<int, OwnedSocket> sockets;
    sockets[peer] = OwnedSocket(descriptor);
    return std::make_unique<TcpLinks>(std::move(sockets));
  }

  Mailbox mailbox_of_0_;
  Mailbox mailbox_of_1_;
  std::unique_ptr<TcpLinks> links_of_0_;
  std::unique_ptr<TcpLinks> links_of_1_;
};

// More than a socket holds, in pieces of all sizes.
TEST_F(TcpLinksTest, KeepsMessagesApartAndInOrder) {
  std::vector<std::vector<std::byte>> sent;
  for (size_t i = 0; i < 200; ++i) {
    const size_t size = i % 3 == 0 ? i * i * 40 : i;
    sent.emplace_back(size, static_cast<std::byte>(i));
  }
  // Nobody reads yet: sending waits for nobody.
  for (const auto& message : sent) links_of_0_->send(1, message);
  links_of_0_->start(mailbox_of_0_);
  links_of_1_->start(mailbox_of_1_);
  EXPECT_EQ(mailbox_of_1_.wait_for_messages(sent.size()), sent);
}

TEST_F(TcpLinksTest, WhatWasSentComesBeforeTheEnd) {
  links_of_0_->start(mailbox_of_0_);
  links_of_1_->start(mailbox_of_1_);
  const std::vector<std::byte> last_words(300, std::byte{7});
  links_of_0_->send(1, last_words);
  links_of_0_ = nullptr;
  EXPECT_THAT(mailbox_of_1_.wait_for_end(), ElementsAre(0));
  EXPECT_THAT(mailbox_of_1_.wait_for_messages(1), ElementsAre(last_words));
  links_of_1_->send(0, last_words);  // to nobody: no error, and no signal
}

TEST_F(TcpLinksTest, WhatIsNoMessageEndsTheConnection) {
  std::array<int, 2> ends = {};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  const OwnedSocket stranger(ends[0]);
  const auto links_of_2 = links(/*peer=*/3, ends[1]);
  Mailbox mailbox;
  links_of_2->start(mailbox);
  const std::array<unsigned char, 8> noise = {255, 255, 255, 255, 1, 2, 3, 4};
  ASSERT_EQ(send(stranger.get(), noise.data(), noise.size(), 0), noise.size());
  EXPECT_THAT(mailbox.wait_for_end(), ElementsAre(3));
}

}  // namespace
}  // namespace brigade
