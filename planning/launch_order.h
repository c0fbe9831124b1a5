// Which entry of a sequence of collectives may be launched next, as what they
// wait for comes in any order.
//
// Every rank must launch the same collectives in the same order, although
// gradients become ready in an order of their own on each rank. So an entry is
// launched when nothing is pending that it waits for *and* all entries before
// it have been launched. This class keeps that account for one iteration, in
// counts; it knows neither what is pending nor what an entry is, and launches
// nothing itself.
//
// Example: two buckets of two gradients, and a collective that waits for its
// turn only.
//
//   LaunchOrder order({2, 2, 0});
//   if (order.mark(entry_of(gradient))) pack(entry_of(gradient));
//   for (; const auto entry = order.next(); order.launched()) launch(*entry);
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_PLANNING_LAUNCH_ORDER_H_
#define BRIGADE_PLANNING_LAUNCH_ORDER_H_

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace brigade {

class LaunchOrder {
 public:
  // `pending[e]`: how many marks entry e waits for; 0: only its turn.
  explicit LaunchOrder(std::vector<size_t> pending)
      : pending_(std::move(pending)) {}

  // One of those that `entry` waits for is there. Returns true if it was the
  // last. REQUIRES: it waits for one.
  bool mark(size_t entry) { return --pending_[entry] == 0; }

  // All that any entry waits for is there, or is done without.
  void mark_all();

  // The next entry, if it is ready. It stays the next one until launched().
  std::optional<size_t> next() const {
    if (all_launched() || pending_[num_launched_] > 0) return std::nullopt;
    return num_launched_;
  }

  // REQUIRES: next().
  void launched() { ++num_launched_; }

  // Those before next().
  size_t num_launched() const { return num_launched_; }
  bool all_launched() const { return num_launched_ == pending_.size(); }

 private:
  std::vector<size_t> pending_;  // by entry
  size_t num_launched_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_LAUNCH_ORDER_H_
