#include "brigade/observing/stall_watch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLongestDefault{60'000};
constexpr milliseconds kLongest = std::chrono::hours{24 * 365};
constexpr int kLooksPerReport = 4;
// A store that works answers within this.
constexpr milliseconds kPatienceWithStore{1'000};

// A rank's answer, a line in the store.
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

std::string since(Clock::time_point begin, Clock::time_point now) {
  return describe_seconds(
      std::chrono::duration_cast<milliseconds>(now - begin));
}

}  // namespace

StallWatch::Check::Check(Place place, Names names,
                         std::shared_ptr<const Progress> progress,
                         std::function<std::string()> describe)
    : place_(std::move(place)),
      questions_key_(absl::StrCat(place_.prefix, "questions")),
      names_(std::move(names)),
      progress_(std::move(progress)),
      describe_(std::move(describe)) {}

std::optional<std::string> StallWatch::Check::look(Time now,
                                                   milliseconds report_after) {
  if (const int64_t num_waits = progress_->num_waits; num_waits != num_waits_) {
    num_waits_ = num_waits;
    since_ = words_since_ = now;
    words_.clear();
    question_ = 0;
    reported_ = false;
    return std::nullopt;
  }
  if (std::string words = describe_(); words != words_) {
    if (!words_.empty()) words_since_ = now;
    words_ = std::move(words);
  }
  const bool waiting = progress_->is_waiting();
  if (waiting && question_ == 0 && now - since_ >= report_after / 2) {
    question_ = place_.store->add(questions_key_, 1);
  }
  answer(now, waiting);
  if (!waiting || reported_ || question_ == 0 || now - since_ < report_after) {
    return std::nullopt;
  }
  reported_ = true;
  return report(now);
}

void StallWatch::Check::answer(Time now, bool waiting) {
  if (!place_.store->check({questions_key_})) return;  // nobody has ever asked
  place_.store->set(
      line_key(place_.rank),
      to_line({.question = place_.store->add(questions_key_, 0),
               .iteration = progress_->iteration,
               .launched = progress_->launched,
               .waits = waiting,
               .words = absl::StrCat(words_, " (no change for ",
                                     since(words_since_, now), ")")}));
}

std::string StallWatch::Check::report(Time now) {
  const int64_t iteration = progress_->iteration;
  const int64_t launched = progress_->launched;
  std::vector<std::string> elsewhere;
  std::vector<int> silent;
  for (int rank = 0; rank < place_.world_size; ++rank) {
    if (rank == place_.rank) continue;
    const std::string key = line_key(rank);
    const Answer answer = place_.store->check({key})
                              ? from_line(place_.store->get_to_str(key))
                              : Answer{};
    const bool is_here = answer.iteration == iteration &&
                         answer.launched >= launched && answer.waits;
    if (answer.question < question_) {
      silent.push_back(rank);
    } else if (!is_here) {
      elsewhere.push_back(absl::StrCat("rank ", rank, " ", answer.words));
    }
  }
  std::vector<std::string> parts;
  if (!elsewhere.empty()) {
    parts.push_back(shortened_list(
        elsewhere.size(), [&](size_t i) { return elsewhere[i]; }, "; "));
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
  const int64_t num_units = progress_->num_units;
  const std::string* const awaited = progress_->awaited;
  const std::string for_what =
      awaited == nullptr ? "" : absl::StrCat(", for ", *awaited, ",");
  return absl::StrCat(
      names_.engine, ": rank ", place_.rank, " has waited ", since(since_, now),
      " for its peers", for_what, " in iteration ", iteration, ", ", launched,
      num_units > 0 ? absl::StrCat(" of ", num_units) : "", " ", names_.unit,
      "s launched.\nLook there: ", absl::StrJoin(parts, "; "), ".");
}

std::string StallWatch::Check::line_key(int rank) const {
  return absl::StrCat(place_.prefix, "line/", rank);
}

struct StallWatch::State {
  State(Check::Place place, Names names, milliseconds time,
        std::shared_ptr<const Progress> progress,
        std::function<std::string()> source)
      : check(std::move(place), std::move(names), std::move(progress),
              [this] {
                const std::lock_guard<std::recursive_mutex> lock(mutex);
                return describe ? describe() : "is being destroyed";
              }),
        describe(std::move(source)),
        report_after(time) {}

  // The thread's.
  void run() {
    std::unique_lock<std::recursive_mutex> lock(mutex);
    while (!is_over) {
      const milliseconds time = report_after;
      if (time.count() == 0) {
        changed.wait(lock);
        continue;
      }
      if (changed.wait_for(lock,
                           std::max(time / kLooksPerReport, milliseconds{1})) ==
              std::cv_status::no_timeout ||
          is_over) {
        continue;
      }
      is_looking = true;
      lock.unlock();
      look(time);
      lock.lock();
      is_looking = false;
      changed.notify_all();
    }
  }

  void look(milliseconds time) {
    try {
      const auto report = check.look(Clock::now(), time);
      if (!report) return;
      // The lock keeps the handler's owner alive while it runs.
      const std::lock_guard<std::recursive_mutex> lock(mutex);
      if (is_over) return;
      if (const auto tell = handler) return tell(*report);
      TORCH_WARN(*report);
    } catch (...) {
      // A store that fails can't be asked; the collective's own error follows.
    }
  }

  Check check;  // the thread's own

  std::recursive_mutex mutex;  // a handler may set another one
  std::condition_variable_any changed;
  // Guarded by mutex.
  std::function<std::string()> describe;  // null once the watch is over
  std::function<void(const std::string&)> handler = nullptr;  // null: warn
  milliseconds report_after;
  bool is_looking = false;
  bool is_over = false;
};

std::unique_ptr<StallWatch> StallWatch::start(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& store_prefix, Names names,
    std::shared_ptr<const Progress> progress,
    std::function<std::string()> describe) {
  const std::string name = names.engine;
  if (!has_peers(*group)) return nullptr;
  try {
    Check::Place place = {.store = group->getStore(),
                          .prefix = absl::StrCat(store_prefix, "progress/"),
                          .rank = group->getRank(),
                          .world_size = group->getSize()};
    const milliseconds after =
        std::min(group_timeout(*group) / 2, kLongestDefault);
    return std::unique_ptr<StallWatch>(new StallWatch(
        std::make_shared<State>(std::move(place), std::move(names), after,
                                std::move(progress), std::move(describe))));
  } catch (const std::exception& error) {
    TORCH_WARN(name, ": stalls will not be reported: ", error.what());
    return nullptr;
  }
}

StallWatch::StallWatch(std::shared_ptr<State> state)
    : process_(getpid()),
      state_(std::move(state)),
      thread_([state = state_] { state->run(); }) {}

void StallWatch::set_report_after(milliseconds time) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->report_after = std::min(time, kLongest);
  state_->changed.notify_all();
}

void StallWatch::set_handler(
    std::function<void(const std::string& report)> handler) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  state_->handler = std::move(handler);
}

StallWatch::~StallWatch() {
  if (getpid() != process_) {
    new std::thread(std::move(thread_));  // of the parent: not to be joined
    return;
  }
  bool can_join = thread_.get_id() != std::this_thread::get_id();
  {
    std::unique_lock<std::recursive_mutex> lock(state_->mutex);
    state_->is_over = true;
    state_->describe = nullptr;
    state_->handler = nullptr;
    state_->changed.notify_all();
    can_join = can_join &&
               state_->changed.wait_for(lock, kPatienceWithStore,
                                        [&] { return !state_->is_looking; });
  }
  can_join ? thread_.join() : thread_.detach();
}

}  // namespace brigade
