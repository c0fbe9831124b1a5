// One exchange of statuses, as this rank takes part in it: its outcome, and
// the wait for that.  Internal to comm/; who makes one is
// comm/control/status_protocol.h.
//
// Thread safety: any thread.

#ifndef BRIGADE_COMM_CONTROL_STATUS_EXCHANGE_H_
#define BRIGADE_COMM_CONTROL_STATUS_EXCHANGE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "brigade/comm/control/rank_status.h"
#include "brigade/comm/control/status_digest.h"

namespace brigade {

enum class AbsenceReason : int64_t {
  kLeft,      // has destroyed its channel
  kClosed,    // its connections are closed
  kTimedOut,  // has waited too long for others
};

// Why a rank does not do its part.
struct Absence {
  int rank = 0;
  AbsenceReason reason = AbsenceReason::kLeft;
  int64_t iteration = 0;                 // its last; only if it has left
  std::optional<StatusOf> failure = {};  // its own or that of another
};

// "rank 1 has left after iteration 7, the connection of rank 2 is closed".
std::string describe(std::span<const Absence> absences);

class StatusExchange {
 public:
  enum class Outcome {
    kPending,
    kAgreed,    // all ranks' statuses agree
    kDiffer,    // they don't, and all are here
    kBroken,    // ranks are absent
    kAborted,   // on this rank
    kTimedOut,  // of a wait; the exchange is pending
  };

  // Waits for nothing: what wait_for_outcome() returns now, kPending if it
  // would wait.
  Outcome outcome() const;

  // Until it is over, `timeout` at most.
  Outcome wait_for_outcome(std::chrono::milliseconds timeout);

  // The same. Errors: RuntimeError unless ranks agree or differ.
  void wait(std::chrono::milliseconds timeout);

  // The error that wait() throws after `outcome`, in a wait of `timeout`.
  // REQUIRES: kBroken, kAborted or kTimedOut.
  [[noreturn]] void throw_why(Outcome outcome,
                              std::chrono::milliseconds timeout) const;

  // Waits for it end, on whatever thread; others still get this rank's part.
  void abort();

  // REQUIRES: kAgreed.
  ToldAlike alike() const;

  // By rank. REQUIRES: kDiffer.
  std::vector<RankStatus> received() const;

  // REQUIRES: kBroken.
  std::vector<Absence> absences() const;

  // For whoever makes it: back to pending, or over.
  void renew();
  void finish_agreed(ToldAlike alike);
  void finish_different(std::vector<RankStatus> by_rank);
  void finish_broken(std::vector<Absence> absences);

 private:
  void finish(Outcome outcome);

  mutable std::mutex mutex_;
  std::condition_variable is_over_;
  Outcome outcome_ = Outcome::kPending;  // guarded by mutex_
  bool is_aborted_ = false;              // guarded by mutex_
  ToldAlike alike_;                      // guarded by mutex_
  std::vector<RankStatus> by_rank_;      // guarded by mutex_
  std::vector<Absence> absences_;        // guarded by mutex_
};

}  // namespace brigade

#endif  // BRIGADE_COMM_CONTROL_STATUS_EXCHANGE_H_
