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
#include "brigade/comm/errors/error_texts.h"
#include "brigade/comm/group/group_info.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLongestDefault{60'000};
constexpr milliseconds kLongest = std::chrono::hours{24 * 365};
constexpr int kChecksPerReport = 4;
constexpr milliseconds kStoreTimeout{1'000};

struct Answer {
  int64_t question = 0;  // last question that the rank has read
  int64_t iteration = 0;
  int64_t launched = 0;
  bool is_waiting = false;
  std::string activity = {};
};

std::string to_line(const Answer& answer) {
  return absl::StrCat(answer.question, " ", answer.iteration, " ",
                      answer.launched, " ", int{answer.is_waiting}, " ",
                      answer.activity);
}

// Returns an empty activity if `line` is malformed.
Answer from_line(const std::string& line) {
  Answer answer;
  std::istringstream in(line);
  in >> answer.question >> answer.iteration >> answer.launched >>
      answer.is_waiting;
  in.get();
  std::getline(in, answer.activity);
  return answer;
}

std::string since(Clock::time_point begin, Clock::time_point now) {
  return describe_seconds(
      std::chrono::duration_cast<milliseconds>(now - begin));
}

}  // namespace

StallWatch::Check::Check(Channel channel, Names names,
                         std::shared_ptr<const Progress> progress,
                         std::function<std::string()> describe)
    : channel_(std::move(channel)),
      questions_key_(absl::StrCat(channel_.prefix, "questions")),
      names_(std::move(names)),
      progress_(std::move(progress)),
      describe_(std::move(describe)) {}

std::optional<std::string> StallWatch::Check::look(Time now,
                                                   milliseconds report_after) {
  if (const int64_t num_waits = progress_->num_waits; num_waits != num_waits_) {
    num_waits_ = num_waits;
    since_ = activity_since_ = now;
    activity_.clear();
    question_ = 0;
    reported_ = false;
    return std::nullopt;
  }
  if (std::string activity = describe_(); activity != activity_) {
    if (!activity_.empty()) activity_since_ = now;
    activity_ = std::move(activity);
  }
  const bool is_waiting = progress_->is_waiting();
  if (is_waiting && question_ == 0 && now - since_ >= report_after / 2) {
    question_ = channel_.store->add(questions_key_, 1);
  }
  answer(now, is_waiting);
  if (!is_waiting || reported_ || question_ == 0 ||
      now - since_ < report_after) {
    return std::nullopt;
  }
  reported_ = true;
  return report(now);
}

void StallWatch::Check::answer(Time now, bool is_waiting) {
  if (!channel_.store->check({questions_key_})) return;
  channel_.store->set(
      answer_key(channel_.rank),
      to_line({.question = channel_.store->add(questions_key_, 0),
               .iteration = progress_->iteration,
               .launched = progress_->launched,
               .is_waiting = is_waiting,
               .activity = absl::StrCat(activity_, " (no progress for ",
                                        since(activity_since_, now), ")")}));
}

std::string StallWatch::Check::report(Time now) {
  const int64_t iteration = progress_->iteration;
  const int64_t launched = progress_->launched;
  std::vector<std::string> late;
  std::vector<int> silent;
  for (int rank = 0; rank < channel_.world_size; ++rank) {
    if (rank == channel_.rank) continue;
    const std::string key = answer_key(rank);
    const Answer answer = channel_.store->check({key})
                              ? from_line(channel_.store->get_to_str(key))
                              : Answer{};
    const bool is_elsewhere = answer.iteration != iteration ||
                              answer.launched < launched || !answer.is_waiting;
    if (answer.question < question_) {
      silent.push_back(rank);
    } else if (is_elsewhere) {
      late.push_back(absl::StrCat("rank ", rank, " ", answer.activity));
    }
  }
  const int64_t num_units = progress_->num_units;
  const std::string* const awaited = progress_->awaited;
  std::string text = absl::StrCat(
      names_.engine, ": rank ", channel_.rank, " has waited ",
      since(since_, now), " for its peers",
      awaited == nullptr ? ""
                         : absl::StrCat(", for ", describe_unit(*awaited), ","),
      " in ", describe_iteration(iteration), " (", launched,
      num_units > 0 ? absl::StrCat(" of ", num_units) : "", " ", names_.unit,
      "s launched).\n");
  if (late.empty() && silent.empty()) {
    return text +
           "All ranks have made the same progress and wait: the communication "
           "itself is slow or stuck, or ranks wait in different collectives "
           "(launched in a hook's then(), or by a forward of one rank).";
  }
  if (!late.empty()) {
    absl::StrAppend(&text, "Late: ",
                    shortened_list(
                        late.size(), [&](size_t i) { return late[i]; }, "; "),
                    ".\n");
  }
  if (!silent.empty()) {
    absl::StrAppend(&text, "No answer from ", describe_ranks(silent),
                    ", which may be stopped, dead or blocked in the store, or "
                    "may have destroyed its model.\n");
  }
  return absl::StrCat(
      text,
      "Look at the stacks of these ranks (py-spy dump, gdb). If "
      "ranks have different numbers of batches, use ",
      names_.without_data, ".");
}

std::string StallWatch::Check::answer_key(int rank) const {
  return absl::StrCat(channel_.prefix, "answer/", rank);
}

struct StallWatch::State {
  State(Check::Channel channel, Names names, milliseconds time,
        std::shared_ptr<const Progress> progress,
        std::function<std::string()> source)
      : check(std::move(channel), std::move(names), std::move(progress),
              [this] {
                const std::lock_guard<std::recursive_mutex> lock(mutex);
                return describe ? describe() : "is being destroyed";
              }),
        describe(std::move(source)),
        report_after(time) {}

  void run() {
    std::unique_lock<std::recursive_mutex> lock(mutex);
    while (!is_over) {
      const milliseconds time = report_after;
      if (time.count() == 0) {
        changed.wait(lock);
        continue;
      }
      if (changed.wait_for(
              lock, std::max(time / kChecksPerReport, milliseconds{1})) ==
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
      // The destructor waits for the lock, so the handler's owner is alive.
      const std::lock_guard<std::recursive_mutex> lock(mutex);
      if (is_over) return;
      if (const auto call = handler) return call(*report);
      TORCH_WARN(*report);
    } catch (...) {
      // If the store has failed, the collective's own error follows.
    }
  }

  Check check;  // used by the watch's thread only

  std::recursive_mutex mutex;  // recursive: a handler may call set_handler()
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
    Check::Channel channel = {.store = group->getStore(),
                              .prefix = absl::StrCat(store_prefix, "progress/"),
                              .rank = group->getRank(),
                              .world_size = group->getSize()};
    const milliseconds after =
        std::min(group_timeout(*group) / 2, kLongestDefault);
    return std::unique_ptr<StallWatch>(new StallWatch(
        std::make_shared<State>(std::move(channel), std::move(names), after,
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
    new std::thread(std::move(thread_));  // leaked: only the parent can join
    return;
  }
  bool can_join = thread_.get_id() != std::this_thread::get_id();
  {
    std::unique_lock<std::recursive_mutex> lock(state_->mutex);
    state_->is_over = true;
    state_->describe = nullptr;
    state_->handler = nullptr;
    state_->changed.notify_all();
    can_join = can_join && state_->changed.wait_for(lock, kStoreTimeout, [&] {
      return !state_->is_looking;
    });
  }
  can_join ? thread_.join() : thread_.detach();
}

}  // namespace brigade
