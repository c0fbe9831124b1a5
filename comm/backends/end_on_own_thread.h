// A shared value that is destroyed on a thread made for that, whichever thread
// drops it last.
//
// A process group that ended on a backend's thread, which drops what a future's
// callback holds, would wait for that very thread.
//
// Thread safety: as std::shared_ptr.

#ifndef BRIGADE_COMM_BACKENDS_END_ON_OWN_THREAD_H_
#define BRIGADE_COMM_BACKENDS_END_ON_OWN_THREAD_H_

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

namespace brigade {

// Values of this process that are being destroyed.
inline std::atomic<int> num_ending_values = 0;

// Waits for them at the end of the program, 10 s at most: their threads use
// what ends with it. A forked child has none of these threads.
class WaitForEndingValues {
 public:
  ~WaitForEndingValues() {
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (getpid() == process_ && num_ending_values > 0 &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  static constexpr std::chrono::seconds kPatience{10};
  const pid_t process_ = getpid();
};

inline void wait_for_ending_values_at_exit() {
  static const WaitForEndingValues at_exit;
}

template <typename T>
std::shared_ptr<T> end_on_own_thread(T value) {
  wait_for_ending_values_at_exit();
  return {new T(std::move(value)), [](T* owned) {
            ++num_ending_values;
            try {
              std::thread([owned] {
                delete owned;
                --num_ending_values;
              }).detach();
            } catch (const std::system_error&) {
              // There is no thread: leaks the value.
              --num_ending_values;
            }
          }};
}

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_END_ON_OWN_THREAD_H_
