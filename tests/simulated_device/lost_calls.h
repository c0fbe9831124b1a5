// A fixture for tests that a call that orders streams is needed: without it the
// race detector finds a race. So the tests of streams would see it go.

#ifndef BRIGADE_TESTS_SIMULATED_DEVICE_LOST_CALLS_H_
#define BRIGADE_TESTS_SIMULATED_DEVICE_LOST_CALLS_H_

#include <c10/core/Stream.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/tests/support/simulated_device/ordering_calls.h"
#include "brigade/tests/support/simulated_device/stream_test.h"
#include "gtest/gtest.h"

namespace brigade::testing {

class LostCallsTest : public simulated::StreamTest {
 protected:
  // Runs `body` whole, which finds no race, and then again and again, each time
  // without another one of the calls of this text that it makes while it is
  // armed. Returns how many of them lead to a race when they are lost.
  //
  // Texts: "gathers waits for a", "records a", "a uses memory", "pinned memory
  // is held". Streams without a name are "default" and "group".
  int count_needed(const std::string& call, const std::function<void()>& body,
                   int* num_lost = nullptr) {
    const auto lose = [&](int nth) {
      const simulated::DropCalls lost(
          [&](const simulated::OrderingCall& found) {
            const std::string text = tell(found);
            if (on_call_) on_call_(text);
            return is_armed_ && text == call && nth-- == 0;
          });
      disarm();
      body();
      disarm();
      return lost.num_dropped();
    };
    lose(-1);
    simulated::expect_no_races();
    int num_needed = 0;
    int nth = 0;
    for (; lose(nth) > 0; ++nth) {
      num_needed += simulated::take_races().empty() ? 0 : 1;
    }
    simulated::take_races();
    EXPECT_GT(nth, 0) << "there is no such call: " << call;
    if (num_lost != nullptr) *num_lost = nth;
    return num_needed;
  }

  // Each of these calls is needed; or one at least, if `some`.
  void expect_needed(const std::string& call, const std::function<void()>& body,
                     bool some = false) {
    int num_lost = 0;
    const int num_needed = count_needed(call, body, &num_lost);
    EXPECT_GE(num_needed, some ? 1 : num_lost) << call;
  }

  // From here on calls may be lost.
  void arm() { is_armed_ = true; }
  void disarm() { is_armed_ = false; }

  // Called with each call, before it may be lost: may arm and disarm.
  void on_call(std::function<void(const std::string&)> function) {
    on_call_ = std::move(function);
  }

  // Names a stream, which has no other name then, nor another the name.
  void name(const c10::Stream& stream, const std::string& name) {
    std::erase_if(names_, [&](const auto& named) {
      return named.first == stream || named.second == name;
    });
    names_.emplace_back(stream, name);
  }

  // A stream of the program, ordered after the default one.
  c10::Stream stream_named(const std::string& as) {
    const c10::Stream stream = simulated::new_stream();
    simulated::make_wait(stream, simulated::default_stream());
    name(stream, as);
    return stream;
  }

 private:
  std::string name_of(const std::optional<c10::Stream>& stream) const {
    for (const auto& [named, name] : names_) {
      if (named == stream) return name;
    }
    return stream == simulated::default_stream() ? "default" : "group";
  }

  std::string tell(const simulated::OrderingCall& call) const {
    using Call = simulated::OrderingCall;
    const std::string stream = name_of(call.stream);
    switch (call.kind) {
      case Call::kRecord:
        return "records " + stream;
      case Call::kWait:
        return absl::StrCat(stream, " waits for ", name_of(call.other));
      case Call::kHostWait:
        return "host waits for " + stream;
      case Call::kRecordUse:
        return stream + " uses memory";
      case Call::kHoldPinned:
        return "pinned memory is held";
      case Call::kSwitch:
        return "switches to " + stream;
    }
    return "";
  }

  std::vector<std::pair<c10::Stream, std::string>> names_;
  std::function<void(const std::string&)> on_call_;
  bool is_armed_ = false;
};

}  // namespace brigade::testing

#endif  // BRIGADE_TESTS_SIMULATED_DEVICE_LOST_CALLS_H_
