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

}  // namespace

void wait_for_at_exit(const c10::intrusive_ptr<Future>& future) {
  OpenFutures& open = open_futures();
  const std::lock_guard<std::mutex> lock(open.mutex);
  while (!open.futures.empty() && !is_open(open.futures.front())) {
    open.futures.pop_front();
  }
  if (!future->completed()) open.futures.emplace_back(future);
}

void wait_at_exit() {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  OpenFutures& open = open_futures();
  if (open.process != getpid()) return;  // the threads are the parent's
  const std::lock_guard<std::mutex> lock(open.mutex);
  bool waited = false;
  for (const c10::weak_intrusive_ptr<Future>& future : open.futures) {
    while (is_open(future) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
      waited = true;
    }
  }
  // A continuation goes a little after its future is done.
  if (waited) std::this_thread::sleep_for(std::chrono::milliseconds{20});
  open.futures.clear();
}

}  // namespace brigade
