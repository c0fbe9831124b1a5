// Of which units a backward may bring gradients on this rank: those that graphs
// hold calls of. What no graph holds need not be waited for.
//
// A graph may also be there unseen: where calls are computed again in backward,
// where a call has neither inputs nor outputs to be found in it, and where a
// unit is made whole by hand. A unit that ever was so always counts.
//
// A backward comes to the calls that graphs hold, and to those that are
// computed again for it: that may be all that is called without gradients in a
// forward, and is taken for so unless the last backward did not need the unit.
//
// Thread safety: none; graphs may end on any thread.

#ifndef BRIGADE_FSDP_SCHEDULE_LIVE_CALLS_H_
#define BRIGADE_FSDP_SCHEDULE_LIVE_CALLS_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace brigade {

class LiveCalls {
 public:
  explicit LiveCalls(size_t num_units) : units_(num_units) {}

  // A unit is called. Returns what its graph holds.
  std::shared_ptr<void> begin(size_t unit) { return units_[unit].held; }

  // A call of it may have a graph that does not hold that.
  void may_be_unseen(size_t unit) { units_[unit].may_be_unseen = true; }

  // A call of it may be computed again in backward.
  void may_be_recomputed(size_t unit) { units_[unit].may_be_recomputed = true; }

  bool may_bring_gradients(size_t unit) const {
    return units_[unit].may_be_unseen || num_held(unit) > 0;
  }

  // Whether a backward may need it whole.
  bool may_be_reached(size_t unit) const {
    const Unit& found = units_[unit];
    return (found.may_be_recomputed && !found.was_idle) || num_held(unit) > 0;
  }
  // A backward that computes is over, which has needed these.
  void note_needed(std::span<const size_t> units) {
    for (Unit& unit : units_) unit.was_idle = true;
    for (const size_t unit : units) units_[unit].was_idle = false;
  }

  // A backward has left a call of it.
  void left(size_t unit) { ++units_[unit].num_left; }
  // It has left all that there are.
  bool are_all_left(size_t unit) const {
    return !units_[unit].may_be_unseen &&
           num_held(unit) == units_[unit].num_left;
  }
  void backward_over() {
    for (Unit& unit : units_) unit.num_left = 0;
  }

 private:
  struct Unit {
    std::shared_ptr<char> held = std::make_shared<char>();  // by graphs, too
    bool may_be_unseen = false;
    bool may_be_recomputed = false;
    bool was_idle = false;  // in the last backward
    long num_left = 0;      // NOLINT(google-runtime-int): as use_count()
  };

  long num_held(size_t unit) const {  // NOLINT(google-runtime-int)
    return units_[unit].held.use_count() - 1;
  }

  std::vector<Unit> units_;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_LIVE_CALLS_H_
