// Which units a backward comes to, and so needs whole: those that its graph
// holds calls of. Frozen units in front of all that is trained are none:
// nothing that they return requires a gradient.
//
// Each rank knows its own before its backward begins. What all ranks say alike
// is not gathered for nothing; else it is, for the ranks that need it.
//
// Thread safety: none.

#ifndef BRIGADE_FSDP_SCHEDULE_REACHED_UNITS_H_
#define BRIGADE_FSDP_SCHEDULE_REACHED_UNITS_H_

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "brigade/fsdp/schedule/unit_calls.h"

namespace brigade {

// What can be told before a forward, by unit: those whose call ends before one
// of a trained unit begins are not reached, if inputs require no gradient.
std::vector<char> assumed_reached(std::span<const UnitCall> calls,
                                  const std::vector<char>& is_trained);

class ReachedUnits {
 public:
  explicit ReachedUnits(size_t num_units)
      : reached_(num_units, 1), seen_(num_units, kUnknown) {}

  // By unit, of this rank: a backward is about to begin.
  void note(std::vector<char> reached) { reached_ = std::move(reached); }
  const std::vector<char>& noted() const { return reached_; }
  // All ranks have noted the same before it, or not.
  void on_begun_together(bool are_alike);

  // In the backward that has begun.
  bool is_left_out(size_t unit) const {
    return are_alike_ && reached_[unit] == 0;
  }
  void backward_over() { are_alike_ = false; }

  // What was last the same on all ranks, or, if nothing was, is assumed.
  const std::vector<char>& last_alike(const std::vector<char>& assumed) const {
    return last_alike_.empty() ? assumed : last_alike_;
  }

  // What to plan for: what was assumed, until it is known; once reached, a unit
  // is expected again, so that steps of two kinds in turns are planned once.
  std::vector<char> expected(const std::vector<char>& assumed) const;
  // Other parameters are trained: nothing is known.
  void forget();

 private:
  static constexpr char kUnknown = 2;

  std::vector<char> reached_;
  std::vector<char> last_alike_;  // empty: none
  bool are_alike_ = false;
  std::vector<char> seen_;  // ever, where ranks were alike
};

}  // namespace brigade

#endif  // BRIGADE_FSDP_SCHEDULE_REACHED_UNITS_H_
