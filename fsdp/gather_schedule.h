// Which units are to be gathered next, and which of them ahead of their need.
//
// A forward is predicted to need units as the last one did, a backward in the
// reverse order of the forwards since end(). What is predicted is gathered up
// to `prefetch_depth` units ahead. A need that was not predicted is met all the
// same, only late, and the prediction goes on behind it. The first forward has
// none.
//
// All ranks must launch the same gathers in the same order. What is returned
// depends on the calls alone, so every call is made where the program stands,
// gathered() where it waits for the unit, and none when a transfer happens to
// end.
//
// Example: depth 1, units 0, 1 and 2, in the second forward.
//
//   schedule.forward_begins(true);  // launch {0}
//   schedule.needs(0);              // launch {1}; then wait for 0
//   schedule.gathered(0);           // nothing; then compute
//   schedule.released(0);           // nothing; its memory is free
//   schedule.needs(1);              // launch {2}
//
// It knows units by number, and launches, waits and frees nothing itself.
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_FSDP_GATHER_SCHEDULE_H_
#define BRIGADE_FSDP_GATHER_SCHEDULE_H_

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"

namespace brigade {

struct GatherScheduleOptions {
  size_t prefetch_depth = 1;  // units; 0: every gather waits for its need

  // Gathers launched and not waited for. One of them is kept for a unit that is
  // needed at once, so with 1 none is ahead. With prefetch_depth + 1 it holds
  // nothing back.
  size_t max_in_flight = 2;
};

// What the owner does upon a call.
struct GatherStep {
  // To be launched in this order, the needed unit first if it is among them.
  std::vector<size_t> launch = {};

  // Gathered for nothing: the owner waits for each, frees it and calls
  // released(), at the latest before the next call that returns a GatherStep.
  // A late unit's gather is launched behind theirs, so waiting for them after
  // it takes no time.
  std::vector<size_t> drop = {};

  // The needed unit is launched only now, where another was predicted.
  bool is_mispredicted = false;

  friend bool operator==(const GatherStep&, const GatherStep&) = default;
};

class GatherSchedule {
 public:
  // Errors: InvalidArgument: `num_units` or `max_in_flight` is 0.
  static absl::StatusOr<GatherSchedule> create(
      size_t num_units, const GatherScheduleOptions& options);

  // `goes_backward`: the next backwards visit this forward's units. A forward
  // without gradients says false.
  GatherStep forward_begins(bool goes_backward);

  // May come several times for one forward. What forward needed is no need of
  // backward's, even where it is held until then.
  GatherStep backward_begins();

  // Of the iteration: nothing is predicted until a forward begins.
  GatherStep end();

  // The program is about to use `unit`; before it does, it waits for it and
  // calls gathered(), unless the unit is held. A need of a unit that is held is
  // met already. Activations that backward computes anew need units as forward
  // does. REQUIRES: `unit` < num_units, here and below; gathered() has been
  // called for the unit needed before.
  GatherStep needs(size_t unit);

  // The program has waited for `unit`, needed or not. Returns what is launched
  // in its place, in order. REQUIRES: it was launched and not waited for.
  std::vector<size_t> gathered(size_t unit);

  // The memory of `unit` is free: another need gathers it again. Returns what
  // is launched in its place. REQUIRES: it was launched; it is held, or was
  // dropped.
  std::vector<size_t> released(size_t unit);

  // Needs that were served late because something else was predicted.
  size_t num_mispredicted() const { return num_mispredicted_; }

 private:
  enum class State : char { kReleased, kInFlight, kHeld };
  struct Unit {
    State state = State::kReleased;
    bool is_ahead = false;  // launched for a prediction, not needed since
  };

  GatherSchedule(size_t num_units, const GatherScheduleOptions& options)
      : options_(options), units_(num_units) {}

  void close_forward();
  GatherStep predict(std::vector<size_t> units);
  void move_cursor(size_t unit);
  std::vector<size_t> next_predicted() const;
  std::vector<size_t> drop_unpredicted();
  std::vector<size_t> launch_predicted();
  void launch(size_t unit, bool is_ahead);
  void leave_flight(size_t unit);
  void no_longer_ahead(size_t unit);

  GatherScheduleOptions options_;  // constant after construction

  std::vector<Unit> units_;    // by unit
  std::vector<size_t> ahead_;  // launched for a prediction, not needed since
  size_t num_ahead_in_flight_ = 0;

  std::vector<size_t> last_forward_;
  std::vector<size_t> to_go_backward_;  // forwards since end(), as needed
  std::vector<size_t> forward_;         // the present one, as far as it is
  bool in_forward_ = false;
  bool goes_backward_ = false;  // the present one's units are backward's

  std::vector<size_t> prediction_;
  size_t cursor_ = 0;  // in prediction_: what is needed next
  size_t num_mispredicted_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_GATHER_SCHEDULE_H_
