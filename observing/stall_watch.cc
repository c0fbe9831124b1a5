#include "brigade/observing/stall_watch.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <map>
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
constexpr int kChecksPerReport = 4;
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

std::string questions_key(const std::string& prefix) {
  return absl::StrCat(prefix, "questions");
}

std::string since(Clock::time_point begin, Clock::time_point now) {
  return describe_seconds(
      std::chrono::duration_cast<milliseconds>(now - begin));
}

milliseconds period_of(milliseconds report_after) {
  if (report_after.count() == 0) return report_after;
  return std::max(report_after / kChecksPerReport, milliseconds{1});
}

}  // namespace

StallWatch::Check::Check(Place place, Names names,
                         std::shared_ptr<const Progress> progress,
                         std::function<std::string()> describe)
    : place_(std::move(place)),
      names_(std::move(names)),
      progress_(std::move(progress)),
      describe_(std::move(describe)) {}

std::optional<std::string> StallWatch::Check::look(Time now,
                                                   milliseconds report_after) {
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
  if (waiting && question_ == 0 && now - since_ >= report_after / 2) {
    question_ = place_.store->add(questions_key(place_.prefix), 1);
  }
  answer(now);
  if (!waiting || reported_ || question_ == 0 || now - since_ < report_after) {
    return std::nullopt;
  }
  reported_ = true;
  return report(now);
}

void StallWatch::Check::begin_anew(int64_t num_waits, Time now) {
  num_waits_ = num_waits;
  since_ = now;
  words_.clear();
  words_since_ = now;
  question_ = 0;
  old_questions_ = seen_questions_;
  reported_ = false;
}

void StallWatch::Check::answer(Time now) {
  seen_questions_ = num_questions();
  if (seen_questions_ <= old_questions_) return;
  place_.store->set(
      line_key(place_.rank),
      to_line({.question = seen_questions_,
               .iteration = progress_->iteration,
               .launched = progress_->launched,
               .waits = progress_->is_waiting(),
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
  const std::string* const awaited = progress_->awaited;
  const std::string for_what =
      awaited == nullptr ? "" : absl::StrCat(", for ", *awaited, ",");
  return absl::StrCat(
      names_.engine, ": rank ", place_.rank, " has waited ", since(since_, now),
      " for its peers", for_what, " in iteration ", iteration, ", ", launched,
      " of ", progress_->num_units.load(), " ", names_.unit,
      "s launched.\nLook there: ", absl::StrJoin(parts, "; "), ".");
}

int64_t StallWatch::Check::num_questions() {
  const std::string key = questions_key(place_.prefix);
  return place_.store->check({key}) ? place_.store->add(key, 0) : 0;
}

std::string StallWatch::Check::line_key(int rank) const {
  return absl::StrCat(place_.prefix, "line/", rank);
}

struct StallWatch::State {
  State(Check::Place place, Names names, milliseconds time,
        std::shared_ptr<const Progress> progress,
        std::function<std::string()> source)
      : describe(std::move(source)),
        check(std::move(place), std::move(names), std::move(progress),
              [this] {
                const std::lock_guard<std::mutex> lock(describe_mutex);
                return describe ? describe() : "is being destroyed";
              }),
        report_after(time) {}

  void look() {
    try {
      if (const auto report = check.look(Clock::now(), report_after)) {
        tell(*report);
      }
    } catch (...) {
      // A store that fails can't be asked; the collective's own error follows.
    }
  }

  // The lock keeps the handler's owner alive while it runs.
  void tell(const std::string& report) {
    const std::lock_guard<std::recursive_mutex> lock(telling);
    if (is_over) return;
    if (handler) {
      handler(report);
    } else {
      TORCH_WARN(report);
    }
  }

  std::mutex describe_mutex;
  std::function<std::string()> describe;  // null once the watch is over
  Check check;                            // the thread's own
  std::atomic<milliseconds> report_after;

  std::recursive_mutex telling;  // a handler may set another one
  // Guarded by telling.
  std::function<void(const std::string&)> handler = nullptr;  // null: warn
  bool is_over = false;
};

// Runs the looks of all watches. A look that blocks delays the others; once its
// owner has given up waiting for it, later watches get another thread.
class StallWatch::Thread {
 public:
  // Lives for good, as its thread may be blocked. A forked child gets its own.
  static Thread& of_process() {
    static std::mutex mutex;
    static Thread* current = nullptr;
    const std::lock_guard<std::mutex> lock(mutex);
    if (current == nullptr || current->process_ != getpid() ||
        current->is_blocked_) {
      current = new Thread;
    }
    return *current;
  }

  // Runs `look` at most once in each `period` from now on; 0: never.
  int64_t add(std::function<void()> look, milliseconds period) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_[++last_added_] = {.look = std::move(look)};
    set_period_locked(last_added_, period);
    return last_added_;
  }

  void set_period(int64_t task, milliseconds period) {
    const std::lock_guard<std::mutex> lock(mutex_);
    set_period_locked(task, period);
  }

  // Waits for a look in progress, `patience` at most.
  void remove(int64_t task, milliseconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    tasks_.erase(task);
    if (std::this_thread::get_id() == thread_) return;  // the look itself
    if (!changed_.wait_for(lock, patience, [&] { return running_ != task; })) {
      is_blocked_ = true;
    }
  }

 private:
  struct Task {
    std::function<void()> look;
    milliseconds period{0};
    Clock::time_point due = {};
  };

  Thread() {
    std::thread thread([this] { loop(); });
    const std::lock_guard<std::mutex> lock(mutex_);
    thread_ = thread.get_id();
    thread.detach();
  }

  void set_period_locked(int64_t task, milliseconds period) {
    tasks_.at(task).period = period;
    tasks_.at(task).due =
        period.count() == 0 ? Clock::time_point::max() : Clock::now() + period;
    changed_.notify_all();
  }

  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const auto next = std::ranges::min_element(
          tasks_, {}, [](const auto& task) { return task.second.due; });
      if (next == tasks_.end() ||
          next->second.due == Clock::time_point::max()) {
        changed_.wait(lock);
      } else if (Clock::now() < next->second.due) {
        const Clock::time_point due = next->second.due;  // it may be removed
        changed_.wait_until(lock, due);
      } else {
        next->second.due = Clock::now() + next->second.period;
        running_ = next->first;
        const std::function<void()> look = next->second.look;
        lock.unlock();
        look();
        lock.lock();
        running_ = 0;
        changed_.notify_all();
      }
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::thread::id thread_;
  std::map<int64_t, Task> tasks_;
  int64_t last_added_ = 0;
  int64_t running_ = 0;  // 0: none
  std::atomic<bool> is_blocked_ = false;
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
      thread_(Thread::of_process()),
      task_(thread_.add([state = state_] { state->look(); },
                        period_of(state_->report_after))) {}

void StallWatch::set_report_after(milliseconds time) {
  time = std::min(time, kLongest);
  state_->report_after = time;
  thread_.set_period(task_, period_of(time));
}

void StallWatch::set_handler(
    std::function<void(const std::string& report)> handler) {
  const std::lock_guard<std::recursive_mutex> lock(state_->telling);
  state_->handler = std::move(handler);
}

StallWatch::~StallWatch() {
  if (getpid() != process_) return;
  {
    const std::lock_guard<std::mutex> lock(state_->describe_mutex);
    state_->describe = nullptr;
  }
  {
    const std::lock_guard<std::recursive_mutex> lock(state_->telling);
    state_->is_over = true;
    state_->handler = nullptr;
  }
  thread_.remove(task_, kPatienceWithStore);
}

}  // namespace brigade
