#include "brigade/comm/errors/peer_error.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "brigade/comm/errors/error_texts.h"

namespace brigade {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kFirstPause{2};
constexpr milliseconds kLongestPause{100};
// Longest reply time of a working store, even on a busy machine.
constexpr milliseconds kGrace{1000};
// Wait for an answer that a rank may have sent before its process ended.
constexpr milliseconds kTimeoutOfLost{300};

// Shared with the store's thread, which may outlive the call.
struct Collection {
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex.
  LivenessProbe probe;
  bool finished = false;
};

// The ranks' answers in the store: lines "rank value" under one key, so that
// each rank sends few requests. A store without append() has one key per rank.
class Answers {
 public:
  Answers(const c10::intrusive_ptr<c10d::Store>& store, const std::string& key)
      : store_(store),
        key_(absl::StrCat("liveness_probe/", key)),
        has_one_key_(store->hasExtendedApi()) {}

  void publish(size_t rank, int64_t value) {
    if (!has_one_key_) {
      return store_->set(key_of(rank), absl::StrCat(value));
    }
    const std::string line = absl::StrCat(rank, " ", value, "\n");
    store_->append(key_, {line.begin(), line.end()});
  }

  // Returns the answers so far, at least those of `ranks`. REQUIRES: publish()
  // was called.
  std::vector<std::pair<size_t, int64_t>> of(
      const std::vector<size_t>& ranks) const {
    std::vector<std::pair<size_t, int64_t>> found;
    if (!has_one_key_) {
      for (const size_t rank : ranks) {
        if (!store_->check({key_of(rank)})) continue;
        found.emplace_back(rank, std::stoll(store_->get_to_str(key_of(rank))));
      }
      return found;
    }
    std::istringstream lines(store_->get_to_str(key_));
    size_t rank = 0;
    int64_t value = 0;
    while (lines >> rank >> value) found.emplace_back(rank, value);
    return found;
  }

 private:
  std::string key_of(size_t rank) const {
    return absl::StrCat(key_, "/", rank);
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  const bool has_one_key_;
};

void collect(Answers answers, size_t rank, int64_t value,
             Clock::time_point deadline,
             const std::function<std::vector<int>()>& lost,
             Collection& collection) {
  answers.publish(rank, value);
  // Reading from a store whose server has ended would log errors.
  if (collection.probe.timeout.count() == 0) return;

  std::vector<size_t> missing;
  for (size_t peer = 0; peer < collection.probe.answers.size(); ++peer) {
    if (peer != rank) missing.push_back(peer);
  }
  const Clock::time_point deadline_of_lost =
      std::min(deadline, Clock::now() + kTimeoutOfLost);
  const auto is_over = [&](milliseconds pause) {
    const std::lock_guard<std::mutex> lock(collection.mutex);
    std::vector<int>& known = collection.probe.lost;
    if (lost) known = lost();
    const bool only_lost = std::ranges::all_of(missing, [&](size_t peer) {
      return std::ranges::count(known, static_cast<int>(peer)) > 0;
    });
    return Clock::now() + pause > (only_lost ? deadline_of_lost : deadline);
  };
  for (milliseconds pause = kFirstPause; !missing.empty();
       pause = std::min(2 * pause, kLongestPause)) {
    const auto found = answers.of(missing);
    {
      const std::lock_guard<std::mutex> lock(collection.mutex);
      auto& known = collection.probe.answers;
      for (const auto& [peer, answer] : found) known.at(peer) = answer;
      std::erase_if(missing,
                    [&](size_t peer) { return known[peer].has_value(); });
    }
    if (missing.empty() || is_over(pause)) break;
    std::this_thread::sleep_for(pause);
  }
}

// Ends the text in one full stop, or in the "..." of a text that was cut.
std::string as_sentence(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  if (text.ends_with("...")) return text;
  while (text.ends_with('.')) text.pop_back();
  return text + '.';
}

template <typename... Errors>
bool is_any_of(const std::exception& error) {
  return (... || (dynamic_cast<const Errors*>(&error) != nullptr));
}

// Rethrows `cause` if its type passes unchanged.
std::string message_of_cause(const std::exception_ptr& cause) {
  if (!cause) return "unknown error";
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    if (is_any_of<PeerError, c10::ValueError, c10::TypeError, c10::IndexError,
                  c10::NotImplementedError, c10::OutOfMemoryError,
                  c10::AcceleratorError>(error)) {
      throw;
    }
  } catch (...) {
    // Not a std::exception; message_of() describes it.
  }
  return message_of(cause);
}

}  // namespace

LivenessProbe probe_liveness(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string_view key,
    int64_t value, std::chrono::milliseconds timeout,
    std::function<std::vector<int>()> lost) {
  const Clock::time_point deadline = Clock::now() + timeout;
  auto collection = std::make_shared<Collection>();
  collection->probe.answers.resize(group->getSize());
  collection->probe.answers[group->getRank()] = value;
  collection->probe.timeout = timeout;

  c10::intrusive_ptr<c10d::Store> store = group->getStore();
  if (!store) {
    if (group->getSize() > 1) {
      collection->probe.store_error = "the group has no store";
    }
    return collection->probe;
  }

  try {
    std::thread([collection, store, key = std::string(key),
                 rank = static_cast<size_t>(group->getRank()), value, deadline,
                 lost = std::move(lost)] {
      std::string error;
      try {
        collect({store, key}, rank, value, deadline, lost, *collection);
      } catch (...) {
        error = message_of(std::current_exception());
      }
      std::lock_guard<std::mutex> lock(collection->mutex);
      collection->probe.store_error = std::move(error);
      collection->finished = true;
      collection->changed.notify_all();
    }).detach();
  } catch (const std::exception& e) {
    collection->probe.store_error = e.what();
    return collection->probe;
  }

  std::unique_lock<std::mutex> lock(collection->mutex);
  const bool finished = collection->changed.wait_until(
      lock, deadline + kGrace, [&] { return collection->finished; });
  if (!finished) {
    collection->probe.store_error = absl::StrCat(
        "no reply from the store within ", describe_seconds(timeout));
  }
  return collection->probe;
}

std::vector<int> LivenessProbe::absent() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (!answers[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::string LivenessProbe::describe() const {
  const std::vector<int> absent = this->absent();
  std::vector<int> present;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    if (answers[rank]) present.push_back(static_cast<int>(rank));
  }
  std::string text;
  if (absent.empty()) {
    text = absl::StrCat(answers.size() == 1
                            ? "the only rank"
                            : absl::StrCat("all ", answers.size(), " ranks"),
                        " answered a liveness probe");
  } else {
    const bool all_lost = std::ranges::all_of(
        absent, [&](int rank) { return std::ranges::count(lost, rank) > 0; });
    const char* const closed = absent.size() == 1
                                   ? ": its process has ended"
                                   : ": their processes have ended";
    text = absl::StrCat(
        describe_ranks(present), " answered a liveness probe, ",
        describe_ranks(absent), " did not",
        all_lost ? closed
                 : absl::StrCat(" within ", describe_seconds(timeout)));
  }
  if (!store_error.empty()) {
    absl::StrAppend(&text, " (the group's store failed: ", store_error, ")");
  }
  return text;
}

void throw_peer_error(std::string_view context, const std::exception_ptr& cause,
                      const LivenessProbe* liveness_probe) {
  std::string message = as_sentence(message_of_cause(cause));
  if (!context.empty()) message = std::string(context) + ": " + message;
  if (liveness_probe != nullptr)
    message += ' ' + liveness_probe->describe() + '.';
  throw PeerError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                  std::move(message));
}

}  // namespace brigade
