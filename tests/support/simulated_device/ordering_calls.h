// Calls that order work of streams, and a way to lose some of them: a program
// from which one is taken out must have a race, or its test proves nothing.
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
    kHoldPinned,  // pinned memory is held back for copies that read it
    kSwitch,      // `stream` becomes the thread's current one, after `other`
  };
  Kind kind;
  std::optional<c10::Stream> stream = std::nullopt;
  std::optional<c10::Stream> other = std::nullopt;
};

// While it lives, calls that it chooses do nothing, on any thread. One at a
// time. Thread safety: `drops` is called by one thread at a time.
class DropCalls {
 public:
  explicit DropCalls(std::function<bool(const OrderingCall&)> drops);
  ~DropCalls();
  DropCalls(const DropCalls&) = delete;
  DropCalls& operator=(const DropCalls&) = delete;

  int64_t num_dropped() const;
};

// For the device: this call is to do nothing.
bool is_dropped(const OrderingCall& call);

}  // namespace brigade::simulated

#endif  // BRIGADE_TESTS_SUPPORT_SIMULATED_DEVICE_ORDERING_CALLS_H_
