// The next collective of a fixed sequence, while the gradients that the entries
// wait for become ready in any order.
//
// Every rank must launch the same collectives in the same order. So an entry is
// launched when its gradients are ready *and* all entries before it have been
// launched. Counts for one iteration; launches nothing itself.
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_PLANNING_LAUNCH_ORDER_H_
#define BRIGADE_PLANNING_LAUNCH_ORDER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace brigade {

class LaunchOrder {
 public:
  // By entry: the number of marks that it waits for; 0: only for its turn.
  explicit LaunchOrder(std::vector<uint32_t> num_pending)
      : num_pending_(std::move(num_pending)) {}

  // One of those that `entry` waits for is there. Returns true if it was the
  // last. REQUIRES: it waits for one.
  bool mark(size_t entry) { return --num_pending_[entry] == 0; }

  // All that any entry waits for is there, or is done without.
  void mark_all() { std::ranges::fill(num_pending_, 0); }

  // The next entry, if it is ready. It stays the next one until launched().
  std::optional<size_t> next() const {
    if (all_launched() || num_pending_[next_] > 0) return std::nullopt;
    return next_;
  }

  // REQUIRES: there is a next() one.
  void launched() { ++next_; }

  bool is_launched(size_t entry) const { return entry < next_; }
  bool all_launched() const { return next_ == num_pending_.size(); }

 private:
  std::vector<uint32_t> num_pending_;  // by entry
  size_t next_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_LAUNCH_ORDER_H_
