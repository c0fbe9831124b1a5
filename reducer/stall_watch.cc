#include "brigade/reducer/stall_watch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>

#include "brigade/comm/group_timeout.h"
#include "brigade/reducer/stall_check.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLongestDefault{60'000};
constexpr milliseconds kLongest = std::chrono::hours{24 * 365};
constexpr int kChecksPerReport = 4;
// The store answers in less, or not at all.
constexpr milliseconds kPatienceWithStore{1'000};

}  // namespace

struct StallWatch::State {
  State(ProgressBoard board, milliseconds time,
        std::shared_ptr<const Progress> progress,
        std::function<std::string()> source)
      : describe(std::move(source)),
        check(std::move(board), time, std::move(progress),
              [this] { return describe_unless_closed(); }),
        report_after(time) {}

  std::string describe_unless_closed() {
    const std::lock_guard<std::mutex> lock(describe_mutex);
    return describe ? describe() : "is being destroyed";
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
      const milliseconds time = report_after;
      const auto is_told = [&] { return stopping || report_after != time; };
      if (time.count() == 0) {
        changed.wait(lock, is_told);
      } else if (!changed.wait_for(
                     lock, std::max(time / kChecksPerReport, milliseconds{1}),
                     is_told)) {
        lock.unlock();
        check.set_report_after(time);
        look();
        lock.lock();
      }
    }
    finished = true;
    changed.notify_all();
  }

  void look() {
    try {
      if (const auto report = check.check(Clock::now())) tell(*report);
    } catch (...) {
      // A store that fails can't be asked; the collective's own error follows.
    }
  }

  void tell(const std::string& report) {
    std::unique_lock<std::mutex> lock(mutex);
    if (stopping) return;
    const auto tell_user = handler;
    lock.unlock();
    if (!tell_user) {
      TORCH_WARN(report);
    } else {
      tell_user(report);
    }
  }

  std::mutex describe_mutex;
  std::function<std::string()> describe;  // null once the watch is over
  StallCheck check;                       // the thread's own

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  milliseconds report_after;                                  // 0: never
  std::function<void(const std::string&)> handler = nullptr;  // null: warn
  bool stopping = false;
  bool finished = false;
};

std::unique_ptr<StallWatch> StallWatch::start(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    std::shared_ptr<const Progress> progress,
    std::function<std::string()> describe) {
  if (group->getSize() == 1 || !group->getStore()) return nullptr;
  try {
    ProgressBoard board(group->getStore(), group->getRank(), group->getSize());
    const milliseconds after =
        std::min(group_timeout(*group) / 2, kLongestDefault);
    return std::unique_ptr<StallWatch>(new StallWatch(std::make_shared<State>(
        std::move(board), after, std::move(progress), std::move(describe))));
  } catch (const std::exception& error) {
    TORCH_WARN("Reducer: stalls will not be reported: ", error.what());
    return nullptr;
  }
}

StallWatch::StallWatch(std::shared_ptr<State> state)
    : process_(getpid()),
      state_(std::move(state)),
      thread_(
          std::make_unique<std::thread>([state = state_] { state->run(); })) {}

void StallWatch::set_report_after(milliseconds time) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->report_after = std::min(time, kLongest);
  state_->changed.notify_all();
}

void StallWatch::set_handler(
    std::function<void(const std::string& report)> handler) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->handler = std::move(handler);
}

StallWatch::~StallWatch() {
  if (getpid() != process_) {
    // The handle is the parent's, and may stand for another thread here.
    thread_.release();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->describe_mutex);
    state_->describe = nullptr;
  }
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool finished = state_->changed.wait_for(
      lock, kPatienceWithStore, [this] { return state_->finished; });
  lock.unlock();
  finished ? thread_->join() : thread_->detach();
}

}  // namespace brigade
