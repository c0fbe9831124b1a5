// The clock of timelines.

#ifndef BRIGADE_OBSERVING_STEADY_TIME_H_
#define BRIGADE_OBSERVING_STEADY_TIME_H_

#include <chrono>
#include <cstdint>

namespace brigade {

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace brigade

#endif  // BRIGADE_OBSERVING_STEADY_TIME_H_
