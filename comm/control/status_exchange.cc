#include "brigade/comm/control/status_exchange.h"

#include <c10/util/Exception.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace brigade {

namespace {

std::string describe(const Absence& absence) {
  const std::string failure =
      absence.failure ? describe(*absence.failure) + "; " : "";
  switch (absence.reason) {
    case AbsenceReason::kLeft:
      return absl::StrCat("rank ", absence.rank, " has left after iteration ",
                          absence.iteration);
    case AbsenceReason::kClosed:
      return absl::StrCat(failure, "the connection of rank ", absence.rank,
                          " is closed");
    case AbsenceReason::kTimedOut:
      return absl::StrCat(failure, "rank ", absence.rank, " waits no longer");
  }
  return absl::StrCat("rank ", absence.rank, " is absent");
}

}  // namespace

std::string describe(std::span<const Absence> absences) {
  return absl::StrJoin(absences, ", ",
                       [](std::string* out, const Absence& absence) {
                         absl::StrAppend(out, describe(absence));
                       });
}

StatusExchange::Outcome StatusExchange::outcome() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_aborted_ ? Outcome::kAborted : outcome_;
}

StatusExchange::Outcome StatusExchange::wait_for_outcome(
    std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const bool is_over = is_over_.wait_for(lock, timeout, [this] {
    return outcome_ != Outcome::kPending || is_aborted_;
  });
  if (!is_over) return Outcome::kTimedOut;
  return is_aborted_ ? Outcome::kAborted : outcome_;
}

void StatusExchange::wait(std::chrono::milliseconds timeout) {
  const Outcome outcome = wait_for_outcome(timeout);
  if (outcome == Outcome::kAgreed || outcome == Outcome::kDiffer) return;
  throw_why(outcome, timeout);
}

void StatusExchange::throw_why(Outcome outcome,
                               std::chrono::milliseconds timeout) const {
  TORCH_CHECK(outcome != Outcome::kAborted, "the exchange was aborted");
  TORCH_CHECK(outcome != Outcome::kBroken, describe(absences()));
  TORCH_CHECK(false, "not all ranks' statuses have come within ",
              static_cast<double>(timeout.count()) / 1000.0, " s");
}

void StatusExchange::abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_aborted_ = true;
  is_over_.notify_all();
}

// A copy, made under the lock: who makes the next use of this object orders
// itself behind it by renew().
std::vector<RankStatus> StatusExchange::received() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return by_rank_;
}

std::vector<Absence> StatusExchange::absences() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return absences_;
}

void StatusExchange::renew() {
  const std::lock_guard<std::mutex> lock(mutex_);
  outcome_ = Outcome::kPending;
  is_aborted_ = false;
}

ToldAlike StatusExchange::alike() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return alike_;
}

void StatusExchange::finish_agreed(ToldAlike alike) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    alike_ = alike;
  }
  finish(Outcome::kAgreed);
}

void StatusExchange::finish_different(std::vector<RankStatus> by_rank) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    by_rank_ = std::move(by_rank);
  }
  finish(Outcome::kDiffer);
}

void StatusExchange::finish_broken(std::vector<Absence> absences) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    absences_ = std::move(absences);
  }
  finish(Outcome::kBroken);
}

void StatusExchange::finish(Outcome outcome) {
  const std::lock_guard<std::mutex> lock(mutex_);
  outcome_ = outcome;
  is_over_.notify_all();
}

}  // namespace brigade
