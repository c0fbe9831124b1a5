#include "brigade/python_bindings/exit_wait.h"

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <mutex>
#include <thread>

namespace brigade {
namespace {

using Future = c10::ivalue::Future;

constexpr std::chrono::seconds kPatience{3};
constexpr std::chrono::milliseconds kPatienceOnceDone{100};
constexpr size_t kDoneFuturesKept = 64;  // users may keep all of them

struct OpenFutures {
  const pid_t process = getpid();
  std::mutex mutex;
  std::deque<c10::weak_intrusive_ptr<Future>> futures;  // guarded by mutex
};

// Never destroyed: threads may use it while the process exits.
OpenFutures& open_futures() {
  static OpenFutures& open = *new OpenFutures;
  return open;
}

bool is_open(const c10::weak_intrusive_ptr<Future>& weak) {
  const c10::intrusive_ptr<Future> future = weak.lock();
  return future && !future->completed();
}

void drop_what_is_over(std::deque<c10::weak_intrusive_ptr<Future>>& futures) {
  std::erase_if(futures, [](const auto& future) { return future.expired(); });
  while (futures.size() > kDoneFuturesKept && !is_open(futures.front())) {
    futures.pop_front();
  }
}

}  // namespace

void wait_for_at_exit(const c10::intrusive_ptr<Future>& future) {
  OpenFutures& open = open_futures();
  const std::lock_guard<std::mutex> lock(open.mutex);
  drop_what_is_over(open.futures);
  open.futures.emplace_back(future);
}

void wait_at_exit() {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  OpenFutures& open = open_futures();
  if (open.process != getpid()) return;  // the threads are the parent's
  const std::lock_guard<std::mutex> lock(open.mutex);
  const auto wait_while = [](Clock::time_point deadline, const auto& holds) {
    while (holds() && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }
  };
  for (const c10::weak_intrusive_ptr<Future>& future : open.futures) {
    wait_while(begin + kPatience, [&] { return is_open(future); });
  }
  const Clock::time_point all_done = Clock::now();
  for (const c10::weak_intrusive_ptr<Future>& future : open.futures) {
    wait_while(all_done + kPatienceOnceDone, [&] { return !future.expired(); });
  }
  open.futures.clear();
}

}  // namespace brigade
