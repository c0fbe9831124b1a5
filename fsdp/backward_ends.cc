#include "brigade/fsdp/backward_ends.h"

#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "brigade/hooks/backward_end.h"

namespace brigade {
namespace {

struct OpenSegment {
  std::weak_ptr<void> owner;
  std::function<void()> on_end;
  std::function<void()> on_abandoned;
};

// Of one backward.
class OpenSegments {
 public:
  void add(OpenSegment segment) {
    const std::lock_guard lock(mutex_);
    open_.push_back(std::move(segment));
  }

  void end() {
    while (std::optional<OpenSegment> last = take_last()) {
      const std::shared_ptr<void> owner = last->owner.lock();
      if (!owner) continue;
      try {
        last->on_end();
      } catch (...) {
        abandon();
        throw;
      }
    }
  }

  void abandon() {
    while (std::optional<OpenSegment> last = take_last()) {
      const std::shared_ptr<void> owner = last->owner.lock();
      if (owner) last->on_abandoned();
    }
  }

 private:
  std::optional<OpenSegment> take_last() {
    const std::lock_guard lock(mutex_);
    if (open_.empty()) return std::nullopt;
    OpenSegment last = std::move(open_.back());
    open_.pop_back();
    return last;
  }

  std::mutex mutex_;
  std::vector<OpenSegment> open_;
};

}  // namespace

void end_with_backward(std::weak_ptr<void> owner, std::function<void()> on_end,
                       std::function<void()> on_abandoned) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<OpenSegments>> of_backwards;
  std::shared_ptr<OpenSegments> segments;
  bool is_first = false;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(of_backwards,
                  [](const auto& item) { return item.second.expired(); });
    std::weak_ptr<OpenSegments>& of_this = of_backwards[running_backward_id()];
    segments = of_this.lock();
    is_first = segments == nullptr;
    if (is_first) of_this = segments = std::make_shared<OpenSegments>();
  }
  segments->add({.owner = std::move(owner),
                 .on_end = std::move(on_end),
                 .on_abandoned = std::move(on_abandoned)});
  if (!is_first) return;
  watch_backward_end(
      segments, [segments] { segments->end(); },
      [segments] { segments->abandon(); });
}

}  // namespace brigade
