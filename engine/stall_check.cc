#include "brigade/engine/stall_check.h"

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/liveness_probe.h"

namespace brigade {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr size_t kMaxNamed = 5;

// What a rank posts.
struct Answer {
  int64_t question = 0;  // the last one that it had seen
  int64_t iteration = 0;
  int64_t launched = 0;
  bool waits = false;  // for its peers
  std::string words = {};
};

std::string to_line(const Answer& answer) {
  return absl::StrCat(answer.question, " ", answer.iteration, " ",
                      answer.launched, " ", int{answer.waits}, " ",
                      answer.words);
}

// Empty words if the line can't be read.
Answer from_line(const std::string& line) {
  Answer answer;
  std::istringstream in(line);
  in >> answer.question >> answer.iteration >> answer.launched >> answer.waits;
  in.get();
  std::getline(in, answer.words);
  return answer;
}

std::string seconds(std::chrono::steady_clock::duration time) {
  return absl::StrCat(
      static_cast<double>(duration_cast<milliseconds>(time).count()) / 1000.0,
      " s");
}

}  // namespace

StallCheck::StallCheck(StallStatus stall_status, StallNames names,
                       std::chrono::milliseconds report_after,
                       std::shared_ptr<const Progress> progress,
                       std::function<std::string()> describe)
    : stall_status_(std::move(stall_status)),
      names_(std::move(names)),
      report_after_(report_after),
      progress_(std::move(progress)),
      describe_(std::move(describe)) {}

std::optional<std::string> StallCheck::check(Time now) {
  const int64_t num_waits = progress_->num_waits;
  if (num_waits != num_waits_) {
    begin_anew(num_waits, now);
    return std::nullopt;
  }
  if (std::string words = describe_(); words != words_) {
    if (!words_.empty()) words_since_ = now;
    words_ = std::move(words);
  }
  const bool waiting = progress_->is_waiting();
  if (waiting && question_ == 0 && now - since_ >= report_after_ / 2) {
    question_ = stall_status_.ask();
  }
  answer(now);
  if (!waiting || reported_ || question_ == 0 || now - since_ < report_after_) {
    return std::nullopt;
  }
  reported_ = true;
  return report(now);
}

void StallCheck::begin_anew(int64_t num_waits, Time now) {
  num_waits_ = num_waits;
  since_ = now;
  words_.clear();
  words_since_ = now;
  question_ = 0;
  old_questions_ = seen_questions_;
  reported_ = false;
}

void StallCheck::answer(Time now) {
  seen_questions_ = stall_status_.num_questions();
  if (seen_questions_ <= old_questions_) return;
  stall_status_.post(
      to_line({.question = seen_questions_,
               .iteration = progress_->iteration,
               .launched = progress_->launched,
               .waits = progress_->is_waiting(),
               .words = absl::StrCat(words_, " (no change for ",
                                     seconds(now - words_since_), ")")}));
}

std::string StallCheck::report(Time now) {
  const int64_t iteration = progress_->iteration;
  const int64_t launched = progress_->launched;
  std::vector<std::string> elsewhere;
  std::vector<int> silent;
  for (int rank = 0; rank < stall_status_.world_size(); ++rank) {
    if (rank == stall_status_.rank()) continue;
    const std::optional<std::string> line = stall_status_.read(rank);
    const Answer answer = line ? from_line(*line) : Answer{};
    const bool is_here = answer.iteration == iteration &&
                         answer.launched >= launched && answer.waits;
    if (answer.question < question_) {
      silent.push_back(rank);
    } else if (!is_here) {
      elsewhere.push_back(absl::StrCat("rank ", rank, " ", answer.words));
    }
  }
  std::vector<std::string> parts(
      elsewhere.begin(),
      elsewhere.begin() + std::min(elsewhere.size(), kMaxNamed));
  if (elsewhere.size() > kMaxNamed) {
    parts.push_back(absl::StrCat(elsewhere.size() - kMaxNamed,
                                 " other ranks do not wait here either"));
  }
  if (!silent.empty()) {
    parts.push_back(
        absl::StrCat("no answer from ", describe_ranks(silent),
                     ", which may be stopped, gone or busy in the store"));
  }
  if (parts.empty()) {
    parts.push_back(
        "all other ranks have come as far and wait: it is the "
        "communication that is slow, or stuck");
  }
  return absl::StrCat(
      names_.engine, ": rank ", stall_status_.rank(), " has waited ",
      seconds(now - since_), " for its peers in iteration ", iteration, ", ",
      launched, " of ", progress_->num_units.load(), " ", names_.unit,
      "s launched.\nLook there: ", absl::StrJoin(parts, "; "), ".");
}

}  // namespace brigade
