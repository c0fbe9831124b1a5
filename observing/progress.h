// How far an engine has come, for a thread that must not wait for its lock.
//
// Thread safety: one thread at a time writes (the engine's lock covers it, or
// whoever waits beside its sequence), any may read. A reader may see a step of
// one field before that of another.

#ifndef BRIGADE_OBSERVING_PROGRESS_H_
#define BRIGADE_OBSERVING_PROGRESS_H_

#include <atomic>
#include <cstdint>
#include <string>

namespace brigade {

struct Progress {
  std::atomic<int64_t> iteration = 0;  // prepared last
  std::atomic<int64_t> launched = 0;   // units of it
  std::atomic<int64_t> num_units = 0;
  std::atomic<int64_t> num_waits = 0;  // that have begun, for peers
  std::atomic<int> num_waiting = 0;    // of these, in progress
  // What the wait is for that began last: "the gather of unit 'a'"; null: what
  // the sequence has launched. Lives as long as this.
  std::atomic<const std::string*> awaited = nullptr;

  bool is_waiting() const { return num_waiting > 0; }
};

// This rank waits for its peers while it lives. May be nested.
class WaitForPeers {
 public:
  // `awaited`: see above.
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

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_PROGRESS_H_
