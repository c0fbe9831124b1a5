// Who keeps whom waiting: what a rank that waits for long says of the late
// ones.
//
// A late rank is busy, so that it can't be asked while it works; a thread of
// every rank calls check() now and then instead, a few times within the time
// after which a stall is reported. The rank that waits asks the others halfway
// and reports at the end; ranks that have waited for nobody since the check
// before answer. While iterations go on nobody reads or writes the stall
// status.
//
// Thread safety: none; one thread calls check().

#ifndef BRIGADE_ENGINE_STALL_CHECK_H_
#define BRIGADE_ENGINE_STALL_CHECK_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "brigade/comm/stall_status.h"
#include "brigade/engine/progress.h"

namespace brigade {

// What reports call the engine and what it launches: "Reducer", "bucket".
struct StallNames {
  std::string engine;
  std::string unit;
};

class StallCheck {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `describe` tells in words what this rank does, beginning with a verb.
  StallCheck(StallStatus stall_status, StallNames names,
             std::chrono::milliseconds report_after,
             std::shared_ptr<const Progress> progress,
             std::function<std::string()> describe);

  void set_report_after(std::chrono::milliseconds report_after) {
    report_after_ = report_after;
  }

  // Returns what to warn of, once per stall. Errors: what the store throws.
  std::optional<std::string> check(Time now);

 private:
  void begin_anew(int64_t num_waits, Time now);
  void answer(Time now);
  std::string report(Time now);

  StallStatus stall_status_;
  const StallNames names_;
  std::chrono::milliseconds report_after_;
  const std::shared_ptr<const Progress> progress_;
  const std::function<std::string()> describe_;

  int64_t num_waits_ = -1;     // seen by the last check
  Time since_;                 // that number has been the same
  std::string words_;          // of this rank, and
  Time words_since_;           // since when it says so
  int64_t question_ = 0;       // of this rank in this stall; 0: not yet asked
  int64_t old_questions_ = 0;  // nobody waits for an answer any more
  int64_t seen_questions_ = 0;
  bool reported_ = false;
};

}  // namespace brigade

#endif  // BRIGADE_ENGINE_STALL_CHECK_H_
