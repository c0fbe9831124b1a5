#include "brigade/comm/control/socket_loop.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "brigade/comm/control/owned_socket.h"

namespace brigade {
namespace {

constexpr SocketLoop::Watch kEnd = 0;  // of the loop; others are greater
constexpr int kMaxEvents = 64;

// Whatever thread is made meanwhile gets none.
class SignalBlock {
 public:
  SignalBlock() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalBlock(const SignalBlock&) = delete;
  SignalBlock& operator=(const SignalBlock&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

class SocketLoop::State {
 public:
  State()
      : epoll_(epoll_create1(EPOLL_CLOEXEC)), end_(eventfd(0, EFD_CLOEXEC)) {
    TORCH_CHECK(epoll_.get() >= 0 && end_.get() >= 0,
                "no socket can be watched: ", std::strerror(errno));
    control(EPOLL_CTL_ADD, end_.get(), EPOLLIN, kEnd);
  }

  Watch add(int socket, std::shared_ptr<SocketHandler> handler) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Watch watch = ++last_watch_;
    control(EPOLL_CTL_ADD, socket, EPOLLIN, watch);
    watched_[watch] = {.socket = socket, .handler = std::move(handler)};
    return watch;
  }

  void set_wants_to_write(Watch watch, bool value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = watched_.find(watch);
    if (found == watched_.end()) return;
    control(EPOLL_CTL_MOD, found->second.socket,
            value ? EPOLLIN | EPOLLOUT : EPOLLIN, watch);
  }

  void remove(Watch watch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = watched_.find(watch);
    if (found == watched_.end()) return;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.socket, nullptr);
    watched_.erase(found);
  }

  void run() {
    std::array<epoll_event, kMaxEvents> events;
    while (true) {
      const int count = epoll_wait(epoll_.get(), events.data(), kMaxEvents, -1);
      for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[i];
        if (event.data.u64 == kEnd) return;
        if (const auto handler = handler_of(event.data.u64)) {
          handler->on_ready((event.events & ~EPOLLOUT) != 0,
                            (event.events & EPOLLOUT) != 0);
        }
      }
    }
  }

  void end() {
    const uint64_t once = 1;
    // Fails only if it has been written to before.
    static_cast<void>(!write(end_.get(), &once, sizeof(once)));
  }

 private:
  struct Watched {
    int socket = -1;
    std::shared_ptr<SocketHandler> handler = {};
  };

  void control(int operation, int socket, uint32_t events, Watch watch) {
    epoll_event event = {};
    event.events = events;
    event.data.u64 = watch;
    TORCH_CHECK(epoll_ctl(epoll_.get(), operation, socket, &event) == 0,
                "a socket can't be watched: ", std::strerror(errno));
  }

  std::shared_ptr<SocketHandler> handler_of(Watch watch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = watched_.find(watch);
    return found == watched_.end() ? nullptr : found->second.handler;
  }

  const OwnedSocket epoll_;
  const OwnedSocket end_;
  std::mutex mutex_;
  std::map<Watch, Watched> watched_;  // guarded by mutex_
  Watch last_watch_ = kEnd;           // guarded by mutex_
};

SocketLoop::SocketLoop() : state_(std::make_shared<State>()) {
  const SignalBlock inherited;
  std::thread([state = state_] { state->run(); }).detach();
}

SocketLoop::~SocketLoop() { state_->end(); }

std::shared_ptr<SocketLoop> SocketLoop::shared() {
  static std::mutex mutex;
  static auto& loops = *new std::map<pid_t, std::weak_ptr<SocketLoop>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<SocketLoop>& kept = loops[getpid()];
  std::shared_ptr<SocketLoop> loop = kept.lock();
  if (!loop) kept = loop = std::make_shared<SocketLoop>();
  return loop;
}

SocketLoop::Watch SocketLoop::watch(int socket,
                                    std::shared_ptr<SocketHandler> handler) {
  return state_->add(socket, std::move(handler));
}

void SocketLoop::set_wants_to_write(Watch watch, bool value) {
  state_->set_wants_to_write(watch, value);
}

void SocketLoop::forget(Watch watch) { state_->remove(watch); }

}  // namespace brigade
