#include "brigade/comm/streams/timed_wait.h"

#include <condition_variable>
#include <memory>
#include <mutex>

namespace brigade {
namespace {

// Outlives a wait that has timed out.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;  // guarded by mutex
};

}  // namespace

bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds timeout) {
  if (future.completed()) return true;
  const auto signal = std::make_shared<Signal>();
  future.addCallback(
      [signal](c10::ivalue::Future&) {
        const std::lock_guard<std::mutex> lock(signal->mutex);
        signal->is_done = true;
        signal->changed.notify_all();
      },
      /*uses_future=*/false);
  std::unique_lock<std::mutex> lock(signal->mutex);
  return signal->changed.wait_for(lock, timeout,
                                  [&] { return signal->is_done; });
}

}  // namespace brigade
