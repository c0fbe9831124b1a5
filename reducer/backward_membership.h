// Membership of backwards in the prepared iteration, or in one that is over.
// The outputs of a forward report here when a backward reaches them.
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
  int64_t number = 0;     // counts prepare() on this rank from 1
  int64_t iteration = 0;  // counts reductions that have begun, on all ranks
                          // alike; several preparations may make but one
};

// A gradient that came before it was known whether its backward belongs to the
// iteration.
struct EarlyGradient {
  VariableIndex variable = {};
  bool is_defined = true;
  int backward_id = 0;
};

class BackwardMembership {
 public:
  // An iteration is prepared: any backward may be its own.
  // `outputs_are_watched`: those of its forward report here.
  void prepared(bool outputs_are_watched);

  // A forward that is not to be reduced has run since: only backwards that go
  // through the prepared outputs are the iteration's, if these report.
  void note_local_forward();

  // The backward `backward_id` goes through an output of a forward that is not
  // to be reduced, whenever that ran. Returns whether it is the first such
  // output; local_backward_ended() is to follow then.
  bool local_output_reached(int backward_id);
  void local_backward_ended(int backward_id);

  // The backward, or one around it, which has an earlier id, goes through such
  // outputs.
  bool is_local(int backward_id) const;

  // True if a backward's gradients may be of such a forward: neither it nor the
  // backward around it has reached the outputs. Asked while no backward of the
  // iteration runs.
  bool is_undecided(int backward_id) const;

  // Until the next prepared(), or until its backward reaches the outputs.
  void keep(const EarlyGradient& gradient) { early_.push_back(gradient); }

  // Those that the backward `backward_id` has brought, which goes through the
  // outputs, and the backwards inside of it, which have later ids. Forgets all.
  std::vector<EarlyGradient> take_from(int backward_id);

  // The iteration, and those prepared before it, was reduced or aborted.
  // `may_be_repeated`: its backward created a graph, so that a later one
  // through the same outputs computes higher derivatives.
  void mark_finished(Preparation preparation, bool may_be_repeated);

  bool is_finished(Preparation preparation) const {
    return preparation.number <= last_finished_;
  }

  // The backward `backward_id` goes through an output of `preparation`.
  void output_reached(Preparation preparation, int backward_id);

  // The iteration that is over and whose outputs this backward went through;
  // none if it may.
  std::optional<int64_t> passed_by(int backward_id) const;

 private:
  enum class Outputs { kUnwatched, kWatched, kRequired };

  Outputs outputs_ = Outputs::kUnwatched;  // of the iteration
  std::vector<EarlyGradient> early_;
  std::vector<int> local_backwards_;  // that are running, by their ids
  int64_t last_finished_ = 0;         // by number of preparation
  int64_t last_repeatable_ = 0;       // likewise
  Preparation reached_;
  std::optional<int> reached_by_;  // a backward's id
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_BACKWARD_MEMBERSHIP_H_
