// Calls that order the work of streams, and fault injection that drops some of
// them. A test proves nothing if its program has no race without such a call.
//
//   DropCalls lost([&](const OrderingCall& call) {
//     return call.kind == OrderingCall::kWait && call.stream == packing;
//   });
//   ... what a test runs ...
//   EXPECT_GT(lost.num_dropped(), 0);

#ifndef BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_ORDERING_CALLS_H_
#define BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_ORDERING_CALLS_H_

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <optional>

namespace brigade::simulated {

struct OrderingCall {
  enum Kind {
    kRecord,      // an event on `stream`
    kWait,        // `stream` waits for an event that was recorded on `other`
    kHostWait,    // the host waits for `stream`, or for an event of it
    kRecordUse,   // record_stream(): `stream` uses memory
    kHoldPinned,  // pinned memory is not reused during a copy
    kSwitch,      // `stream` becomes the thread's current one, after `other`
  };
  Kind kind;
  std::optional<c10::Stream> stream = std::nullopt;
  std::optional<c10::Stream> other = std::nullopt;
};

// During the scope, calls for which `drops` returns true do nothing, on any
// thread. One instance at a time. Thread safety: `drops` is called by one
// thread at a time.
class DropCalls {
 public:
  explicit DropCalls(std::function<bool(const OrderingCall&)> drops);
  ~DropCalls();
  DropCalls(const DropCalls&) = delete;
  DropCalls& operator=(const DropCalls&) = delete;

  int64_t num_dropped() const;
};

// Returns true if the device must ignore this call.
bool is_dropped(const OrderingCall& call);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_ORDERING_CALLS_H_
