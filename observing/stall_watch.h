// Warns of stalls while an engine waits: who keeps whom waiting, and what the
// late ranks do.
//
// A late rank is busy, so that it can't be asked while it works. A thread of
// every rank looks now and then instead, a few times within the time after
// which a stall is reported. The rank that waits asks the others halfway, in
// the group's store, and reports at the end; ranks that have waited for nobody
// since the look before answer there. While iterations go on nobody reads or
// writes it.
//
// All watches of the process share the thread. It never takes the engine's lock
// for long, and keeps what the store throws to itself.
//
// Thread safety: made and destroyed by one thread.

#ifndef BRIGADE_OBSERVING_STALL_WATCH_H_
#define BRIGADE_OBSERVING_STALL_WATCH_H_

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "brigade/observing/periodic_thread.h"
#include "brigade/observing/progress.h"

namespace brigade {

class StallWatch {
 public:
  class Check;

  // What reports call the engine and what it launches: "Reducer", "bucket".
  struct Names {
    std::string engine;
    std::string unit;
  };

  // Null if there is nobody to wait for, or no store to ask through. Reports
  // after half of the group's timeout, 60 s at most. `store_prefix`: of keys
  // there, equal on all ranks, and of no other watch.
  //
  // `describe` tells what this rank does, beginning with a verb; it is called
  // on the watch's thread, and not any more once the watch is being destroyed.
  static std::unique_ptr<StallWatch> start(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      const std::string& store_prefix, Names names,
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

// What is done at each look, at times that the caller tells.
//
// Thread safety: none; one thread calls it.
class StallWatch::Check {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Who looks, and where ranks ask each other.
  struct Place {
    c10::intrusive_ptr<c10d::Store> store;
    std::string prefix;  // as for start()
    int rank = 0;
    int world_size = 0;
  };

  Check(Place place, Names names, std::chrono::milliseconds report_after,
        std::shared_ptr<const Progress> progress,
        std::function<std::string()> describe);

  void set_report_after(std::chrono::milliseconds report_after) {
    report_after_ = report_after;
  }

  // Returns what to warn of, once per stall. Errors: what the store throws.
  std::optional<std::string> look(Time now);

 private:
  void begin_anew(int64_t num_waits, Time now);
  void answer(Time now);
  std::string report(Time now);

  // Of all ranks so far. One look into the store while nobody has ever asked.
  int64_t num_questions();
  std::string line_key(int rank) const;  // of what it has posted last

  const Place place_;
  const Names names_;
  std::chrono::milliseconds report_after_;
  const std::shared_ptr<const Progress> progress_;
  const std::function<std::string()> describe_;

  int64_t num_waits_ = -1;     // seen by the last look
  Time since_;                 // that number has been the same
  std::string words_;          // of this rank, and
  Time words_since_;           // since when it says so
  int64_t question_ = 0;       // of this rank in this stall; 0: not yet asked
  int64_t old_questions_ = 0;  // nobody waits for an answer any more
  int64_t seen_questions_ = 0;
  bool reported_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_STALL_WATCH_H_
