// Assignment of backwards to the prepared iteration, to a finished one, or to a
// local forward. A reentrant backward has a later id than the backward that it
// runs in.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_BACKWARD_MEMBERSHIP_H_
#define BRIGADE_REDUCER_BACKWARD_MEMBERSHIP_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

// A forward whose backward will be reduced.
struct Preparation {
  int64_t number = 0;     // counts prepare() on this rank, from 1
  int64_t iteration = 0;  // counts reductions, equal on all ranks; several
                          // preparations may have the same
};

// A gradient that became ready before its backward was assigned.
struct EarlyGradient {
  VariableIndex variable = {};
  bool is_defined = true;
  int backward_id = 0;
};

class BackwardMembership {
 public:
  // An iteration is prepared: any backward may belong to it.
  // `outputs_are_watched`: output_reached() will be called.
  void prepared(bool outputs_are_watched);

  // A local forward has run, which is not reduced. If the prepared outputs are
  // watched, only backwards that reach them belong to the iteration from now
  // on.
  void note_local_forward();

  // The backward has reached an output of a local forward. Returns true for the
  // first output; local_backward_ended() is called later then.
  bool local_output_reached(int backward_id);
  void local_backward_ended(int backward_id);

  // Returns true if the backward, or one around it, has reached such outputs.
  bool is_local(int backward_id) const;

  // Returns true if the backward may be of a local forward: it has not reached
  // the prepared outputs. REQUIRES: no backward of the iteration runs.
  bool is_undecided(int backward_id) const;

  // Keeps a gradient until its backward reaches the prepared outputs, or until
  // the next prepared().
  void keep_early(const EarlyGradient& gradient) { early_.push_back(gradient); }

  // Returns the kept gradients of the backward and of those inside it, and
  // forgets all others.
  std::vector<EarlyGradient> take_early_gradients(int backward_id);

  // This iteration, with all prepared before it, was reduced or aborted.
  // `may_be_repeated`: its backward created a graph, so a later backward
  // through the same outputs computes higher derivatives.
  void mark_finished(Preparation preparation, bool may_be_repeated);

  bool is_finished(Preparation preparation) const {
    return preparation.number <= last_finished_;
  }

  // The backward has reached an output of `preparation`.
  void output_reached(Preparation preparation, int backward_id);

  // Returns the finished iteration whose outputs the backward has reached;
  // nullopt if there is none, or if it may be repeated.
  std::optional<int64_t> finished_iteration_of(int backward_id) const;

 private:
  enum class Outputs { kUnwatched, kWatched, kRequired };

  Outputs outputs_ = Outputs::kUnwatched;  // of the prepared forward
  std::vector<EarlyGradient> early_;
  std::vector<int> local_backwards_;  // ids of running ones
  int64_t last_finished_ = 0;         // number of a preparation
  int64_t last_repeatable_ = 0;       // likewise
  Preparation reached_;
  std::optional<int> reached_by_;  // id of a backward
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BACKWARD_MEMBERSHIP_H_
