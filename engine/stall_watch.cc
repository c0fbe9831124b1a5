#include "brigade/engine/stall_watch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/group_timeout.h"
#include "brigade/engine/stall_check.h"

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
  State(StallStatus stall_status, StallNames names, milliseconds time,
        std::shared_ptr<const Progress> progress,
        std::function<std::string()> source)
      : describe(std::move(source)),
        check(std::move(stall_status), std::move(names), time,
              std::move(progress), [this] { return describe_unless_closed(); }),
        report_after(time) {}

  std::string describe_unless_closed() {
    const std::lock_guard<std::mutex> lock(describe_mutex);
    return describe ? describe() : "is being destroyed";
  }

  void look() {
    try {
      {
        const std::lock_guard<std::mutex> lock(mutex);
        check.set_report_after(report_after);
      }
      if (const auto report = check.check(Clock::now())) tell(*report);
    } catch (...) {
      // A store that fails can't be asked; the collective's own error follows.
    }
  }

  // The handler may be the engine's owner's, which must be there while it runs.
  void tell(const std::string& report) {
    const std::lock_guard<std::recursive_mutex> lock(telling);
    if (is_over) return;
    if (handler) {
      handler(report);
    } else {
      TORCH_WARN(report);
    }
  }

  std::mutex describe_mutex;
  std::function<std::string()> describe;  // null once the watch is over
  StallCheck check;                       // the thread's own

  std::mutex mutex;
  milliseconds report_after;  // guarded by mutex

  std::recursive_mutex telling;  // a handler may set another one
  // Guarded by telling.
  std::function<void(const std::string&)> handler = nullptr;  // null: warn
  bool is_over = false;
};

namespace {

milliseconds period_of(milliseconds report_after) {
  if (report_after.count() == 0) return report_after;
  return std::max(report_after / kChecksPerReport, milliseconds{1});
}

}  // namespace

std::unique_ptr<StallWatch> StallWatch::start(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& store_prefix, StallNames names,
    std::shared_ptr<const Progress> progress,
    std::function<std::string()> describe) {
  const std::string name = names.engine;
  if (group->getSize() == 1 || !group->getStore()) return nullptr;
  try {
    StallStatus stall_status(group->getStore(),
                             absl::StrCat(store_prefix, "progress/"),
                             group->getRank(), group->getSize());
    const milliseconds after =
        std::min(group_timeout(*group) / 2, kLongestDefault);
    return std::unique_ptr<StallWatch>(new StallWatch(std::make_shared<State>(
        std::move(stall_status), std::move(names), after, std::move(progress),
        std::move(describe))));
  } catch (const std::exception& error) {
    TORCH_WARN(name, ": stalls will not be reported: ", error.what());
    return nullptr;
  }
}

StallWatch::StallWatch(std::shared_ptr<State> state)
    : process_(getpid()),
      state_(std::move(state)),
      thread_(PeriodicThread::shared()),
      task_(thread_->add([state = state_] { state->look(); },
                         period_of(state_->report_after))) {}

void StallWatch::set_report_after(milliseconds time) {
  time = std::min(time, kLongest);
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->report_after = time;
  }
  thread_->set_period(task_, period_of(time));
}

void StallWatch::set_handler(
    std::function<void(const std::string& report)> handler) {
  const std::lock_guard<std::recursive_mutex> lock(state_->telling);
  state_->handler = std::move(handler);
}

StallWatch::~StallWatch() {
  if (getpid() != process_) {
    // There is no thread here to be joined.
    new std::shared_ptr<PeriodicThread>(std::move(thread_));
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(state_->describe_mutex);
    state_->describe = nullptr;
  }
  {
    const std::lock_guard<std::recursive_mutex> lock(state_->telling);
    state_->is_over = true;
    state_->handler = nullptr;
  }
  thread_->remove(task_, kPatienceWithStore);
}

}  // namespace brigade
