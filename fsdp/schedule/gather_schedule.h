// Which units a rank gathers, and in which order, whatever its program does.
//
// Gathers belong to a pass: a forward, or a backward. All ranks know the units
// that a pass is expected to need, in order, and each launches just these, in
// this order: ahead of their need, where a program needs them as expected; and
// also those that its program leaves out, since peers may need them. So ranks
// whose programs take different branches launch the same.
//
// A unit that is needed and not expected any more is late: the rest of the pass
// is launched first, so that no peer waits for this rank, which then asks all
// for the unit.
//
// Example: depth 1, units 0, 1 and 2.
//
//   schedule.begin({0, 1, 2});  // launch {0}
//   schedule.needs(0);          // launch {1}; then wait for 0, compute
//   schedule.released(0);
//   schedule.needs(2);          // launch {2}; 1 was left out
//   schedule.rest();            // nothing is left
//   schedule.unclaimed();       // {1}: to be released
//
// It knows units by number, and launches, waits and frees nothing itself.
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_FSDP_SCHEDULE_GATHER_SCHEDULE_H_
#define BRIGADE_FSDP_SCHEDULE_GATHER_SCHEDULE_H_

#include <cstddef>
#include <span>
#include <vector>

namespace brigade {

// What the owner does upon a need.
struct GatherStep {
  std::vector<size_t> launch = {};  // in this order

  // The unit is not among them, and nothing of the pass is left: the owner asks
  // its peers for it.
  bool is_late = false;

  friend bool operator==(const GatherStep&, const GatherStep&) = default;
};

class GatherSchedule {
 public:
  // `depth`: how many gathers are launched ahead of their need; 0: none.
  GatherSchedule(size_t num_units, size_t depth)
      : depth_(depth),
        states_(num_units, State::kReleased),
        filled_by_(num_units, 0) {}

  // A pass begins that is expected to need these units, some perhaps several
  // times. Returns what is launched ahead. REQUIRES: rest() of the last one has
  // been launched, and what was unclaimed() is released.
  std::vector<size_t> begin(std::vector<size_t> expected);

  // The program is about to use `unit`, and waits for it. `ahead`: units to be
  // launched ahead with it, if they are expected; none: as many as the depth
  // says. Outside of a pass each unit that is not there is late.
  GatherStep needs(size_t unit, std::span<const size_t> ahead = {});

  // Of the gather that a need of `unit` now would wait for, among the expected
  // ones; all of them, if it is late.
  size_t awaited_by(size_t unit) const;

  // Expected units that a need of `unit` now would leave out, in order.
  std::vector<size_t> left_out_by(size_t unit) const;

  // What comes before the next expected need of `unit`, and that one: launched
  // now, ahead of it. Late: nothing.
  std::vector<size_t> launch_through(size_t unit);

  // The memory of `unit` is free. REQUIRES: it was launched, or needed.
  void released(size_t unit) {
    if (states_[unit] == State::kUnclaimed) ++num_unneeded_;
    states_[unit] = State::kReleased;
  }

  // The next that the pass has not launched, which is to be launched now, if
  // any.
  std::vector<size_t> next();

  // Units that gathers before `place`, among the expected ones, have made
  // whole, and that were not needed, in that order.
  std::vector<size_t> unclaimed_before(size_t place) const;

  // What the pass has not launched, and is to be launched now.
  std::vector<size_t> rest();

  // Units that were launched and not needed.
  std::vector<size_t> unclaimed() const;

  // Launched or needed, and not released.
  bool is_there(size_t unit) const { return states_[unit] != State::kReleased; }
  bool is_claimed(size_t unit) const {
    return states_[unit] == State::kClaimed;
  }

  // What the present pass, or the last one, was seen to need, in order: what
  // the next of its kind may expect.
  const std::vector<size_t>& record() const { return record_; }

  size_t depth() const { return depth_; }
  size_t num_expected() const { return expected_.size(); }
  size_t num_launched() const { return num_launched_; }  // of the expected
  // Of the expected, up to the last need.
  size_t num_needed() const { return num_needed_; }

  size_t num_late() const { return num_late_; }    // needs, of all passes
  size_t num_ahead() const { return num_ahead_; }  // launches before a need
  size_t num_unneeded() const { return num_unneeded_; }  // launches without one

 private:
  enum class State : char { kReleased, kUnclaimed, kClaimed };

  // Of the next need of `unit` among the expected ones; all of them, if it is
  // late, or there already for another reason.
  size_t place_of(size_t unit) const;
  void launch_ahead(std::vector<size_t>& launched, size_t end);
  size_t end_behind(std::span<const size_t> ahead) const;
  std::vector<size_t> launch_up_to(size_t end);

  const size_t depth_;
  std::vector<State> states_;      // by unit
  std::vector<size_t> filled_by_;  // by unit that is there: place of the gather

  std::vector<size_t> expected_;
  size_t num_launched_ = 0;  // of expected_
  size_t num_needed_ = 0;    // of expected_: the position behind the last need
  std::vector<size_t> record_;

  size_t num_late_ = 0;
  size_t num_ahead_ = 0;
  size_t num_unneeded_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_GATHER_SCHEDULE_H_
