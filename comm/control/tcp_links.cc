#include "brigade/comm/control/tcp_links.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace brigade {
namespace {

using Length = uint32_t;  // of the message that follows

// No message is as long; what says so is not one of ours.
constexpr Length kMaxLength = 1 << 28;
constexpr size_t kReadBytes = 16 << 10;

bool is_only_full_or_empty(int error) {
  return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

}  // namespace

class TcpLinks::Connection final : public SocketHandler {
 public:
  Connection(int peer, OwnedSocket socket)
      : peer_(peer), socket_(std::move(socket)) {
    const int yes = 1;
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) | O_NONBLOCK);
  }

  void start(const std::shared_ptr<Connection>& self, SocketLoop& loop,
             LinkListener& listener) {
    const std::lock_guard<std::mutex> reading(reading_);
    const std::lock_guard<std::mutex> writing(writing_);
    loop_ = &loop;
    listener_ = &listener;
    watch_ = loop.watch(socket_.get(), self);
    if (!unsent_.empty()) loop.set_wants_to_write(watch_, true);
  }

  void end() {
    const std::lock_guard<std::mutex> reading(reading_);
    const std::lock_guard<std::mutex> writing(writing_);
    if (loop_ != nullptr) loop_->forget(watch_);
    loop_ = nullptr;
    listener_ = nullptr;
  }

  void send(Bytes message) {
    const std::lock_guard<std::mutex> lock(writing_);
    const auto length = static_cast<Length>(message.size());
    const Bytes head = std::as_bytes(std::span(&length, 1));
    size_t written = 0;
    if (unsent_.empty()) {
      std::array<iovec, 2> parts = {
          {{const_cast<std::byte*>(head.data()), head.size()},
           {const_cast<std::byte*>(message.data()), message.size()}}};
      msghdr all = {};
      all.msg_iov = parts.data();
      all.msg_iovlen = parts.size();
      const ssize_t result =
          sendmsg(socket_.get(), &all, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (result < 0 && !is_only_full_or_empty(errno)) return break_off();
      written = result < 0 ? 0 : static_cast<size_t>(result);
      if (written == head.size() + message.size()) return;
      if (loop_ != nullptr) loop_->set_wants_to_write(watch_, true);
    }
    if (written < head.size()) {
      const Bytes rest = head.subspan(written);
      unsent_.insert(unsent_.end(), rest.begin(), rest.end());
      written = head.size();
    }
    const Bytes rest = message.subspan(written - head.size());
    unsent_.insert(unsent_.end(), rest.begin(), rest.end());
  }

  void on_ready(bool can_read, bool can_write) override {
    if (can_write) send_unsent();
    if (can_read) read();
  }

 private:
  void send_unsent() {
    const std::lock_guard<std::mutex> lock(writing_);
    const ssize_t result = ::send(socket_.get(), unsent_.data(), unsent_.size(),
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
    if (result < 0 && is_only_full_or_empty(errno)) return;
    if (result < 0) {
      break_off();
      unsent_.clear();
    } else {
      unsent_.erase(unsent_.begin(), unsent_.begin() + result);
    }
    if (unsent_.empty() && loop_ != nullptr) {
      loop_->set_wants_to_write(watch_, false);
    }
  }

  void read() {
    const std::lock_guard<std::mutex> lock(reading_);
    if (listener_ == nullptr) return;
    std::array<std::byte, kReadBytes> buffer;
    const ssize_t result =
        recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (result < 0 && is_only_full_or_empty(errno)) return;
    if (result <= 0 || !take(Bytes(buffer).first(result))) close();
  }

  // Hands over whole messages. Whether they are of the expected form.
  bool take(Bytes come) {
    const bool continues = !unread_.empty();
    if (continues) unread_.insert(unread_.end(), come.begin(), come.end());
    Bytes rest = continues ? Bytes(unread_) : come;
    while (rest.size() >= sizeof(Length)) {
      Length length = 0;
      std::memcpy(&length, rest.data(), sizeof(length));
      if (length > kMaxLength) return false;
      if (rest.size() < sizeof(length) + length) break;
      listener_->on_message(peer_, rest.subspan(sizeof(length), length));
      rest = rest.subspan(sizeof(length) + length);
    }
    if (continues) {
      unread_.erase(unread_.begin(), unread_.end() - rest.size());
    } else {
      unread_.assign(rest.begin(), rest.end());
    }
    return true;
  }

  // Both sides are told of it where they read.
  void break_off() { shutdown(socket_.get(), SHUT_RDWR); }

  void close() {
    break_off();
    LinkListener& listener = *std::exchange(listener_, nullptr);
    {
      const std::lock_guard<std::mutex> lock(writing_);
      loop_->forget(watch_);
      loop_ = nullptr;
    }
    listener.on_closed(peer_);
  }

  const int peer_;
  const OwnedSocket socket_;
  SocketLoop::Watch watch_ = {};

  // Taken first; held while the listener is called.
  std::mutex reading_;
  LinkListener* listener_ = nullptr;  // guarded by reading_; null: not reading
  std::vector<std::byte> unread_;     // guarded by reading_

  std::mutex writing_;
  SocketLoop* loop_ = nullptr;     // guarded by writing_; null: not watched
  std::vector<std::byte> unsent_;  // guarded by writing_
};

TcpLinks::TcpLinks(std::map<int, OwnedSocket> sockets)
    : loop_(SocketLoop::shared()) {
  for (auto& [peer, socket] : sockets) {
    connections_[peer] = std::make_shared<Connection>(peer, std::move(socket));
  }
}

TcpLinks::~TcpLinks() {
  for (const auto& [peer, connection] : connections_) connection->end();
}

void TcpLinks::start(LinkListener& listener) {
  for (const auto& [peer, connection] : connections_) {
    connection->start(connection, *loop_, listener);
  }
}

void TcpLinks::send(int peer, Bytes message) {
  connections_.at(peer)->send(message);
}

int TcpLinks::num_connections() const {
  return static_cast<int>(connections_.size());
}

}  // namespace brigade
