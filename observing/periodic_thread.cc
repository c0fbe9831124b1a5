#include "brigade/observing/periodic_thread.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace brigade {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

}  // namespace

struct PeriodicThread::State {
  struct Task {
    std::function<void()> run;
    milliseconds period;
    Clock::time_point due;
  };

  void loop() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!stopping) {
      const auto next = first_due();
      if (next == tasks.end()) {
        changed.wait(lock);
      } else if (Clock::now() < next->second.due) {
        const Clock::time_point due = next->second.due;  // it may be removed
        changed.wait_until(lock, due);
      } else {
        next->second.due = Clock::now() + next->second.period;
        run(next->first, next->second.run, lock);
      }
    }
  }

  std::map<int64_t, Task>::iterator first_due() {
    auto first = tasks.end();
    for (auto task = tasks.begin(); task != tasks.end(); ++task) {
      if (task->second.period.count() == 0) continue;
      if (first == tasks.end() || task->second.due < first->second.due) {
        first = task;
      }
    }
    return first;
  }

  // A copy of the function: the task may be removed meanwhile.
  void run(int64_t task, std::function<void()> function,
           std::unique_lock<std::mutex>& lock) {
    running = task;
    lock.unlock();
    try {
      function();
    } catch (...) {
      // The task's own business.
    }
    lock.lock();
    running = 0;
    changed.notify_all();
  }

  const pid_t process = getpid();
  std::thread thread;

  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  std::map<int64_t, Task> tasks;
  int64_t last_added = 0;
  int64_t running = 0;  // 0: none
  bool stopping = false;
  bool is_blocked = false;  // by a task that was abandoned
};

std::shared_ptr<PeriodicThread> PeriodicThread::shared() {
  static std::mutex mutex;
  static std::weak_ptr<PeriodicThread> current;
  const std::lock_guard<std::mutex> lock(mutex);
  if (auto thread = current.lock()) {
    const std::lock_guard<std::mutex> state_lock(thread->state_->mutex);
    if (thread->state_->process == getpid() && !thread->state_->is_blocked) {
      return thread;
    }
  }
  const std::shared_ptr<PeriodicThread> made(new PeriodicThread);
  current = made;
  return made;
}

PeriodicThread::PeriodicThread() : state_(std::make_shared<State>()) {
  state_->thread = std::thread([state = state_] { state->loop(); });
}

PeriodicThread::~PeriodicThread() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool leaves_it = (state_->is_blocked && state_->running != 0) ||
                         state_->thread.get_id() == std::this_thread::get_id();
  lock.unlock();
  leaves_it ? state_->thread.detach() : state_->thread.join();
}

int64_t PeriodicThread::add(std::function<void()> task, milliseconds period) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->tasks[++state_->last_added] = {
      .run = std::move(task), .period = period, .due = Clock::now() + period};
  state_->changed.notify_all();
  return state_->last_added;
}

void PeriodicThread::set_period(int64_t task, milliseconds period) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  State::Task& changed = state_->tasks.at(task);
  changed.period = period;
  changed.due = Clock::now() + period;
  state_->changed.notify_all();
}

void PeriodicThread::remove(int64_t task, milliseconds patience) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->tasks.erase(task);
  // What the task itself ends will not be run again.
  if (state_->thread.get_id() == std::this_thread::get_id()) return;
  const bool ended = state_->changed.wait_for(
      lock, patience, [&] { return state_->running != task; });
  if (!ended) state_->is_blocked = true;
}

}  // namespace brigade
