// Fixture for mutation tests of stream ordering: a call is needed if the race
// detector finds a race without it.

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
  // Runs `body` unchanged and expects no race. Then runs it once for each armed
  // call with the text `call`, without that call. Returns the number of runs
  // with a race.
  //
  // Texts: "gathers waits for a", "records a", "a uses memory", "pinned memory
  // is held". Unnamed streams are "default" and "group".
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

  // Expects that each of these calls is needed; at least one if `some`.
  void expect_needed(const std::string& call, const std::function<void()>& body,
                     bool some = false) {
    int num_lost = 0;
    const int num_needed = count_needed(call, body, &num_lost);
    EXPECT_GE(num_needed, some ? 1 : num_lost) << call;
  }

  // Later calls may be dropped, until disarm().
  void arm() { is_armed_ = true; }
  void disarm() { is_armed_ = false; }

  // Calls `function` before each call is counted; it may arm and disarm.
  void on_call(std::function<void(const std::string&)> function) {
    on_call_ = std::move(function);
  }

  // Names a stream; names and streams stay unique.
  void name(const c10::Stream& stream, const std::string& name) {
    std::erase_if(names_, [&](const auto& named) {
      return named.first == stream || named.second == name;
    });
    names_.emplace_back(stream, name);
  }

  // Makes a stream ordered after the default one.
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
