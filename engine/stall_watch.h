// Warns of stalls while an engine waits.
//
// Decides when to look; what it sees and says is stall_check.h's. It looks a
// few times within the time after which a stall is reported, on a thread that
// all watches of the process share, never takes the engine's lock for long,
// and keeps what the store throws to itself.
//
// Thread safety: made and destroyed by one thread.

#ifndef BRIGADE_ENGINE_STALL_WATCH_H_
#define BRIGADE_ENGINE_STALL_WATCH_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "brigade/engine/periodic_thread.h"
#include "brigade/engine/progress.h"
#include "brigade/engine/stall_check.h"

namespace brigade {

class StallWatch {
 public:
  // Null if there is nobody to wait for, or no store to ask through. Reports
  // after half of the group's timeout, 60 s at most. `store_prefix`: of keys
  // there, equal on all ranks, and of no other watch.
  //
  // `describe` tells what this rank does; it is called on the watch's thread,
  // and not any more once the watch is being destroyed.
  static std::unique_ptr<StallWatch> start(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      const std::string& store_prefix, StallNames names,
      std::shared_ptr<const Progress> progress,
      std::function<std::string()> describe);

  // 0: never; then it does not answer either. Any thread may call it.
  void set_report_after(std::chrono::milliseconds time);

  // Called on the watch's thread with what would have been a warning; null:
  // warn again. Any thread may call it. What the handler throws is dropped.
  void set_handler(std::function<void(const std::string& report)> handler);

  // Waits for a look that is being made, unless the store keeps it. The handler
  // is not called any more. In a forked child, where there is no thread, does
  // nothing.
  ~StallWatch();

  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

 private:
  struct State;

  explicit StallWatch(std::shared_ptr<State> state);

  const pid_t process_;
  const std::shared_ptr<State> state_;  // shared with the thread
  std::shared_ptr<PeriodicThread> thread_;
  int64_t task_ = 0;  // of the thread
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STALL_WATCH_H_
