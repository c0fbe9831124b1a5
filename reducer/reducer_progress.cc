// What a reducer tells of itself: its timeline, its last error, and how far it
// has come while others wait for it.

#include <c10/util/Exception.h>

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "brigade/reducer/reducer.h"

namespace brigade {

void Reducer::forward_begins() {
  const std::lock_guard<std::mutex> lock(mutex_);
  hooks_->prefetch_for_forward();
  observations_.timeline.forward_begins(observations_.begun + 1);
}

Timeline Reducer::timeline() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return observations_.timeline.last();
}

void Reducer::set_stall_report_after(std::chrono::milliseconds time) {
  TORCH_CHECK_VALUE(
      time.count() >= 0,
      "Reducer::set_stall_report_after: expected at least 0, got ",
      time.count(),
      " ms.\nGive the time after which a stall is reported, or 0 "
      "for never.");
  observations_.stall_report_after = time;
  if (observations_.stall_watch) {
    observations_.stall_watch->set_report_after(time);
  }
}

void Reducer::set_stall_handler(
    std::function<void(const std::string& report)> handler) {
  if (observations_.stall_watch) {
    observations_.stall_watch->set_handler(std::move(handler));
  } else {
    observations_.stall_handler = std::move(handler);
  }
}

void Reducer::set_timeline_sample_rate(int64_t sample_rate) {
  const std::lock_guard<std::mutex> lock(mutex_);
  observations_.timeline.set_sample_rate(sample_rate);
}

std::optional<ReducerError> Reducer::last_error() const {
  return observations_.last_error.get();
}

// Called on another thread; never waits for the lock, which a reducer that
// waits for its peers holds.
std::string Reducer::describe_progress() const {
  const Progress& progress = *observations_.progress;
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    const std::string how_far =
        absl::StrCat("has launched ", progress.launched.load(), " of ",
                     progress.num_buckets.load(), " buckets of iteration ",
                     progress.iteration.load());
    return progress.is_waiting()
               ? absl::StrCat(how_far, " and waits for its peers")
               : absl::StrCat(how_far, " and is inside a hook");
  }
  if (is_between(phase_)) {
    return absl::StrCat("has prepared nothing since iteration ",
                        observations_.begun);
  }
  if (!has_begun(phase_)) {
    return absl::StrCat("has prepared iteration ", iteration_->iteration,
                        ", whose backward has reached no parameter");
  }
  const std::vector<size_t> missing = missing_parameters();
  std::string words = absl::StrCat(
      "has launched ", num_buckets(iteration_->launches), " of ",
      bound_.buckets.size(), " buckets of iteration ", iteration_->iteration);
  if (!missing.empty()) {
    absl::StrAppend(&words, " and waits for the gradients of ",
                    table_.name_of(missing));
  }
  return words;
}

}  // namespace brigade
