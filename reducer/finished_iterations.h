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

class FinishedIterations {
 public:
  // Reduced, or given up after an error. `may_be_repeated`: its backward
  // created a graph, so that a later one through the same outputs computes
  // higher derivatives, and is not mistaken for a repetition.
  void mark_finished(int64_t iteration, bool may_be_repeated) {
    last_finished_ = iteration;
    if (may_be_repeated) last_repeatable_ = iteration;
  }

  // The backward `backward_id` goes through an output of `iteration`.
  void output_reached(int64_t iteration, int backward_id) {
    reached_iteration_ = iteration;
    reached_by_ = backward_id;
  }

  // The iteration that is over and whose outputs this backward went through;
  // none if it may.
  std::optional<int64_t> passed_by(int backward_id) const {
    if (backward_id != reached_by_ || reached_iteration_ > last_finished_ ||
        reached_iteration_ == last_repeatable_) {
      return std::nullopt;
    }
    return reached_iteration_;
  }

 private:
  int64_t last_finished_ = 0;
  int64_t last_repeatable_ = 0;
  int64_t reached_iteration_ = 0;
  std::optional<int> reached_by_;  // a backward's id
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_FINISHED_ITERATIONS_H_
