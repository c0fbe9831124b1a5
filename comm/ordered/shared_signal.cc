#include "brigade/comm/ordered/shared_signal.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace brigade {
namespace {

// Not the private kind, which other processes don't see: std::atomic has no
// other.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value,
          timeout, nullptr, 0);
}

// A wait is never longer; whoever waits looks again.
constexpr std::chrono::nanoseconds kLongest = std::chrono::seconds(3600);

}  // namespace

void SharedSignal::raise() {
  count_.fetch_add(1);
  if (num_waiting_.load() > 0) futex(count_, FUTEX_WAKE, INT_MAX, nullptr);
}

void SharedSignal::wait(uint32_t seen,
                        std::chrono::steady_clock::time_point deadline) {
  const auto now = std::chrono::steady_clock::now();
  if (now >= deadline) return;
  const auto left = deadline - now < kLongest
                        ? std::chrono::nanoseconds(deadline - now)
                        : kLongest;
  const timespec timeout = {.tv_sec = left.count() / 1'000'000'000,
                            .tv_nsec = left.count() % 1'000'000'000};
  num_waiting_.fetch_add(1);
  futex(count_, FUTEX_WAIT, seen, &timeout);  // returns if it has changed
  num_waiting_.fetch_sub(1);
}

}  // namespace brigade
