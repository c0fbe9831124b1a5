// Which iterations are over, and which backward runs through one of them again.
//
// The outputs of a forward pass report here when a backward reaches them.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_FINISHED_ITERATIONS_H_
#define BRIGADE_REDUCER_FINISHED_ITERATIONS_H_

#include <cstdint>
#include <optional>

namespace brigade {

// A forward whose backward will be reduced.
struct Preparation {
  int64_t number = 0;     // counts prepare_for_backward() on this rank from 1
  int64_t iteration = 0;  // counts reductions that have begun, on all ranks
                          // alike; several preparations may make but one
};

class FinishedIterations {
 public:
  // Reduced, or given up after an error, and what was prepared before it too.
  // `may_be_repeated`: its backward created a graph, so that a later one
  // through the same outputs computes higher derivatives, and is not mistaken
  // for a repetition.
  void mark_finished(Preparation preparation, bool may_be_repeated) {
    last_finished_ = preparation.number;
    if (may_be_repeated) last_repeatable_ = preparation.number;
  }

  bool is_finished(Preparation preparation) const {
    return preparation.number <= last_finished_;
  }

  // The backward `backward_id` goes through an output of `preparation`.
  void output_reached(Preparation preparation, int backward_id) {
    reached_ = preparation;
    reached_by_ = backward_id;
  }

  // The iteration that is over and whose outputs this backward went through;
  // none if it may.
  std::optional<int64_t> passed_by(int backward_id) const {
    if (backward_id != reached_by_ || !is_finished(reached_) ||
        reached_.number == last_repeatable_) {
      return std::nullopt;
    }
    return reached_.iteration;
  }

 private:
  int64_t last_finished_ = 0;    // by number of preparation
  int64_t last_repeatable_ = 0;  // likewise
  Preparation reached_;
  std::optional<int> reached_by_;  // a backward's id
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_FINISHED_ITERATIONS_H_
