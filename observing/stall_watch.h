// Stall reports: name the late ranks that an engine waits for, and their
// progress.
//
// A late rank is busy, so a thread on every rank checks its progress, four
// times per report time. After half of that time, a waiting rank posts a
// question in the group's store; the other ranks' threads answer in the store.
// After all of it, the waiting rank reports. While iterations proceed, no rank
// accesses the store.

#ifndef BRIGADE_OBSERVING_STALL_WATCH_H_
#define BRIGADE_OBSERVING_STALL_WATCH_H_

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace brigade {

// Progress of an engine, readable without the engine's lock.
//
// Thread safety: one writer at a time, any readers. A reader may see changes of
// different fields in any order.
struct Progress {
  std::atomic<int64_t> iteration = 0;  // last prepared, or iteration_of()
  std::atomic<int64_t> launched = 0;   // units in this iteration
  std::atomic<int64_t> num_units = 0;
  std::atomic<int64_t> num_waits = 0;  // waits for peers, begun so far
  std::atomic<int> num_waiting = 0;    // waits for peers in progress
  // Name of the FSDP unit that the last wait is for; null: the launched units.
  // Must live as long as this object.
  std::atomic<const std::string*> awaited = nullptr;

  bool is_waiting() const { return num_waiting > 0; }
};

// Marks this rank as waiting for its peers while it lives. May be nested.
class WaitForPeers {
 public:
  // `awaited`: as Progress::awaited.
  explicit WaitForPeers(Progress& progress,
                        const std::string* awaited = nullptr)
      : progress_(progress), outer_(progress.awaited.exchange(awaited)) {
    progress_.num_waits.fetch_add(1, std::memory_order_relaxed);
    progress_.num_waiting.fetch_add(1, std::memory_order_relaxed);
  }
  ~WaitForPeers() {
    progress_.num_waiting.fetch_sub(1, std::memory_order_relaxed);
    progress_.awaited = outer_;
  }
  WaitForPeers(const WaitForPeers&) = delete;
  WaitForPeers& operator=(const WaitForPeers&) = delete;

 private:
  Progress& progress_;
  const std::string* const outer_;
};

// Thread that checks for stalls and reports them.
//
// Thread safety: constructed and destroyed by one thread; the setters may be
// called by any thread.
class StallWatch {
 public:
  class Check;

  // Words in reports.
  struct Names {
    std::string engine;        // "Reducer"
    std::string unit;          // "bucket"
    std::string without_data;  // remedy for a rank with fewer batches: "join()"
  };

  // Returns null if the group has no peers or no store. Reports after half of
  // the group's timeout, at most 60 s.
  // `store_prefix`: of keys in the store; identical on all ranks, and unique
  // among watches.
  // `describe`: returns this rank's activity, beginning with a verb. Called on
  // the watch's thread, and never after the destructor.
  static std::unique_ptr<StallWatch> start(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      const std::string& store_prefix, Names names,
      std::shared_ptr<const Progress> progress,
      std::function<std::string()> describe);

  // 0: never reports, and does not answer other ranks.
  void set_report_after(std::chrono::milliseconds time);

  // Replaces the warning with a call on the watch's thread; null restores the
  // warning. Exceptions of the handler are ignored.
  void set_handler(std::function<void(const std::string& report)> handler);

  // Waits for a running handler, and at most 1 s for the store. The handler is
  // not called any more. Does nothing in a forked child, which has no such
  // thread.
  ~StallWatch();

  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

 private:
  struct State;

  explicit StallWatch(std::shared_ptr<State> state);

  const pid_t process_;
  const std::shared_ptr<State> state_;  // shared with the thread
  std::thread thread_;
};

// State and logic of the checks, with the caller's clock.
//
// Thread safety: none.
class StallWatch::Check {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Store through which ranks ask each other.
  struct Channel {
    c10::intrusive_ptr<c10d::Store> store;
    std::string prefix;  // of keys
    int rank = 0;
    int world_size = 0;
  };

  Check(Channel channel, Names names, std::shared_ptr<const Progress> progress,
        std::function<std::string()> describe);

  // Returns one report per stall that has lasted for `report_after`.
  //
  // Errors: the store's.
  std::optional<std::string> look(Time now,
                                  std::chrono::milliseconds report_after);

 private:
  void answer(Time now, bool is_waiting);
  std::string report(Time now);
  std::string answer_key(int rank) const;

  const Channel channel_;
  const std::string questions_key_;  // counts the questions of all ranks
  const Names names_;
  const std::shared_ptr<const Progress> progress_;
  const std::function<std::string()> describe_;

  int64_t num_waits_ = -1;  // at the last check
  Time since_;              // last change of num_waits_
  std::string activity_;    // returned by describe_
  Time activity_since_;     // last change of activity_
  int64_t question_ = 0;    // of this rank in this stall; 0: not yet asked
  bool reported_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_STALL_WATCH_H_
