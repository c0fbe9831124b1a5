// Shared pointer whose value is destroyed on a new thread. A process group
// needs it: its last owner may be a callback on its backend's thread, where the
// destructor would wait for itself.
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

// Number of values that are being destroyed.
inline std::atomic<int> num_ending_values = 0;

// Waits at process exit, at most 10 s, for the threads that destroy values:
// they use static objects. A forked child does not have these threads.
class WaitForEndingValues {
 public:
  ~WaitForEndingValues() {
    const auto end = std::chrono::steady_clock::now() + kExitTimeout;
    while (getpid() == process_ && num_ending_values > 0 &&
           std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  static constexpr std::chrono::seconds kExitTimeout{10};
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
              // No thread can be started: leaks the value.
              --num_ending_values;
            }
          }};
}

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_END_ON_OWN_THREAD_H_
