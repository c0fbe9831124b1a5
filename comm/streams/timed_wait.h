// Waits for a future no longer than a given time.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_STREAMS_TIMED_WAIT_H_
#define BRIGADE_COMM_STREAMS_TIMED_WAIT_H_

#include <ATen/core/ivalue.h>

#include <chrono>

namespace brigade {

// Whether `future` was completed within `timeout`.
bool wait_for(c10::ivalue::Future& future, std::chrono::milliseconds timeout);

}  // namespace brigade

#endif  // BRIGADE_COMM_STREAMS_TIMED_WAIT_H_
