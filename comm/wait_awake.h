// Waits for a collective that is nearly done without going to sleep.
//
// To be woken from future.wait() takes 50 us and more, which is what a small
// collective takes as a whole. Other threads get the core first if they want
// it.

#ifndef BRIGADE_COMM_WAIT_AWAKE_H_
#define BRIGADE_COMM_WAIT_AWAKE_H_

#include <ATen/core/ivalue.h>

#include <chrono>
#include <thread>

namespace brigade {

// For how long staying awake pays: beyond it a wait is long anyhow.
inline constexpr std::chrono::microseconds kMaxTimeAwake{100};

// Returns when `future` is completed, or at `deadline`; then it is to be waited
// for. Thread safety: any thread.
inline void wait_awake(const c10::ivalue::Future& future,
                       std::chrono::steady_clock::time_point deadline) {
  while (!future.completed() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
}

}  // namespace brigade

#endif  // BRIGADE_COMM_WAIT_AWAKE_H_
