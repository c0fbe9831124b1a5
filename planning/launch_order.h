// Which entry of a sequence of collectives may be launched next, as what they
// wait for comes in any order.
//
// Every rank must launch the same collectives of a group in the same order,
// although gradients become ready in an order of their own on each rank. So an
// entry is launched when nothing is pending that it waits for *and* all entries
// of its group before it have been launched; groups don't wait for each other.
// This class keeps that account for one iteration, in counts; it knows neither
// what is pending nor what an entry is, and launches nothing itself.
//
// Example: two buckets of two gradients, and a collective that waits for its
// turn only.
//
//   LaunchOrder order({{.num_pending = 2}, {.num_pending = 2}, {}});
//   if (order.mark(entry_of(gradient))) pack(entry_of(gradient));
//   while (const auto entry = order.next()) {
//     launch(*entry);
//     order.launched(*entry);
//   }
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_PLANNING_LAUNCH_ORDER_H_
#define BRIGADE_PLANNING_LAUNCH_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"

namespace brigade {

class LaunchOrder {
 public:
  struct Entry {
    uint32_t num_pending = 0;  // marks that it waits for; 0: only its turn
    uint32_t group = 0;
  };

  explicit LaunchOrder(std::vector<Entry> entries);

  // One of those that `entry` waits for is there. Returns true if it was the
  // last. REQUIRES: it waits for one.
  bool mark(size_t entry) { return --entries_[entry].num_pending == 0; }

  // All that any entry waits for is there, or is done without.
  void mark_all();

  // The next entry of a group, if it is ready; of several groups', that of the
  // lowest. It stays the next one until launched().
  std::optional<size_t> next() const;

  // REQUIRES: `entry` is next().
  void launched(size_t entry);

  // False of what is no entry.
  bool is_pending(size_t entry) const {
    return entry < entries_.size() && entries_[entry].num_pending > 0;
  }
  bool is_launched(size_t entry) const {
    return entry < entries_.size() && entry < next_[entries_[entry].group];
  }
  bool all_launched() const;

 private:
  // The first entry of this group from here on.
  size_t find(uint32_t group, size_t from) const;

  std::vector<Entry> entries_;
  absl::InlinedVector<size_t, 2> next_;  // by group; entries_.size(): none
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_LAUNCH_ORDER_H_
