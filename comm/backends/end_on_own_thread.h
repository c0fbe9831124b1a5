// A shared value that ends on a thread made for that, whoever drops it last.
//
// A backend completes collectives on threads of its own. What a future's
// callback holds is dropped there: if a process group ended with it, the group
// would wait for the very thread that it ends on.
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

// Values of this process whose threads have been made and are not done.
inline std::atomic<int> num_ending_values = 0;

// A program that is over waits for them, if not for ever: what they use ends
// with it. A child that was forked has none of their threads.
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
              // No thread to be had: better kept for good.
              --num_ending_values;
            }
          }};
}

}  // namespace brigade

#endif  // BRIGADE_COMM_BACKENDS_END_ON_OWN_THREAD_H_
