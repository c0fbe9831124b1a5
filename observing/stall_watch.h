// Stall reports: name the ranks that an engine waits for, and their progress.
//
// A late rank can't be asked while it works. So on every rank a thread looks at
// the progress four times within the time after which a stall is reported. A
// rank that waits asks the others halfway, in the group's store, and reports at
// the end; the others' threads answer there. While iterations go on, nobody
// reads or writes the store.

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

// Progress of an engine, read without the engine's lock.
//
// Thread safety: one thread at a time writes, any may read. A reader may see a
// change of one field before that of another.
struct Progress {
  std::atomic<int64_t> iteration = 0;  // prepared last
  std::atomic<int64_t> launched = 0;   // units of it
  std::atomic<int64_t> num_units = 0;
  std::atomic<int64_t> num_waits = 0;  // that have begun, for peers
  std::atomic<int> num_waiting = 0;    // of these, in progress
  // The object of the last wait: "the gather of unit 'a'"; null: the launched
  // units. Lives as long as this.
  std::atomic<const std::string*> awaited = nullptr;

  bool is_waiting() const { return num_waiting > 0; }
};

// This rank waits for its peers during the object's lifetime. May be nested.
class WaitForPeers {
 public:
  // `awaited`: see Progress.
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

// Thread safety: made and destroyed by one thread; the setters by any.
class StallWatch {
 public:
  class Check;

  // For reports: "Reducer", "bucket".
  struct Names {
    std::string engine;
    std::string unit;
  };

  // Returns null if there is nobody to wait for, or no store to ask through.
  // Reports after half of the group's timeout, 60 s at most. `store_prefix`: of
  // keys in the store, equal on all ranks, and of no other watch.
  //
  // `describe` returns this rank's activity, beginning with a verb; it is
  // called on the watch's thread, and not after the destructor.
  static std::unique_ptr<StallWatch> start(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      const std::string& store_prefix, Names names,
      std::shared_ptr<const Progress> progress,
      std::function<std::string()> describe);

  // 0: never; then this rank does not answer either.
  void set_report_after(std::chrono::milliseconds time);

  // Called on the watch's thread in place of a warning; null: warn again.
  // Exceptions of the handler are dropped.
  void set_handler(std::function<void(const std::string& report)> handler);

  // Waits for a look in progress, unless the store blocks it. The handler is
  // not called any more. In a forked child, where there is no thread, does
  // nothing.
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

// The logic of one look, with a clock of the caller's.
//
// Thread safety: none; one thread calls it.
class StallWatch::Check {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `prefix`: of keys in `store`, by which ranks ask each other.
  struct Place {
    c10::intrusive_ptr<c10d::Store> store;
    std::string prefix;
    int rank = 0;
    int world_size = 0;
  };

  Check(Place place, Names names, std::shared_ptr<const Progress> progress,
        std::function<std::string()> describe);

  // Returns a report once per stall that has lasted for `report_after`. Errors:
  // the store's.
  std::optional<std::string> look(Time now,
                                  std::chrono::milliseconds report_after);

 private:
  void answer(Time now, bool waiting);
  std::string report(Time now);
  std::string line_key(int rank) const;  // of its last answer

  const Place place_;
  const std::string questions_key_;  // a count of all ranks' questions
  const Names names_;
  const std::shared_ptr<const Progress> progress_;
  const std::function<std::string()> describe_;

  int64_t num_waits_ = -1;  // seen by the last look
  Time since_;              // when that number changed
  std::string words_;       // this rank's description
  Time words_since_;        // when that changed
  int64_t question_ = 0;    // of this rank in this stall; 0: not yet asked
  bool reported_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_STALL_WATCH_H_
