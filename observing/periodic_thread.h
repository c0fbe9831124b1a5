// A thread that runs small tasks now and then, one for all of a process.
//
// Decides when a task is run; tasks are those of stall watches.  A task that
// blocks keeps the others waiting: when its owner gives it up, later tasks get
// another thread.
//
// Thread safety: any thread may call any method, a task too.

#ifndef BRIGADE_OBSERVING_PERIODIC_THREAD_H_
#define BRIGADE_OBSERVING_PERIODIC_THREAD_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

namespace brigade {

class PeriodicThread {
 public:
  // The process's; ends with its last owner.  A forked child gets its own.
  static std::shared_ptr<PeriodicThread> shared();

  // Joins; leaves the thread behind if a task was abandoned.
  ~PeriodicThread();

  PeriodicThread(const PeriodicThread&) = delete;
  PeriodicThread& operator=(const PeriodicThread&) = delete;

  // Runs `task` at most once in each `period` from then on; 0: never.  What it
  // throws is dropped.  Returns its name for the methods below.
  int64_t add(std::function<void()> task, std::chrono::milliseconds period);
  void set_period(int64_t task, std::chrono::milliseconds period);

  // The task is run no more; waits for a run to end, `patience` at most.
  void remove(int64_t task, std::chrono::milliseconds patience);

 private:
  struct State;

  PeriodicThread();

  const std::shared_ptr<State> state_;  // shared with the thread
};

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_PERIODIC_THREAD_H_
