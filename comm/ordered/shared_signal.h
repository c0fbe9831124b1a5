// A counter in memory that processes share, on whose changes they may wait.
//
//   const uint32_t seen = signal.count();
//   if (!is_there()) signal.wait(seen, deadline);    // and looks again
//
// Zeroed memory is one that was never raised.
//
// Thread safety: any thread of any process.

#ifndef BRIGADE_COMM_ORDERED_SHARED_SIGNAL_H_
#define BRIGADE_COMM_ORDERED_SHARED_SIGNAL_H_

#include <atomic>
#include <chrono>
#include <cstdint>

namespace brigade {

class SharedSignal {
 public:
  uint32_t count() const { return count_.load(); }

  // What was written before is seen by those that it wakes.
  void raise();

  // Until it is raised after count() was `seen`, or the deadline; may return
  // sooner.
  void wait(uint32_t seen, std::chrono::steady_clock::time_point deadline);

 private:
  std::atomic<uint32_t> count_;
  std::atomic<uint32_t> num_waiting_;
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
};

}  // namespace brigade

#endif  // BRIGADE_COMM_ORDERED_SHARED_SIGNAL_H_
