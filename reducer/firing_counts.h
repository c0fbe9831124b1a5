// How often the gradient hook of each parameter fires in an iteration of a
// static graph.
//
// A parameter that a reentrant checkpoint or shared weights reach several times
// gets its gradient in several parts. The first iteration counts them; in later
// ones a gradient is ready when its last part has come.
//
// Variables go by their number, replica by replica.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_FIRING_COUNTS_H_
#define BRIGADE_REDUCER_FIRING_COUNTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brigade {

class FiringCounts {
 public:
  explicit FiringCounts(size_t num_variables);

  // True until settle(): nothing is known of the graph.
  bool is_learning() const { return learning_; }

  // True if all ranks learn in this iteration.
  bool are_peers_learning() const { return learning_ && !peers_settled_; }

  // The other ranks have settled in an iteration that this one only shadowed;
  // it learns in its own first one.
  void peers_settled() { peers_settled_ = true; }

  // An iteration begins; what an unfinished one counted is forgotten.
  void restart();

  // Counts a firing. True if it was the last of this iteration; false while
  // learning. REQUIRES: it has not been the last before.
  bool is_last(size_t variable);

  // The first iteration is over: its counts hold from now on. Returns the
  // variables that fired, in the order of their last firings.
  std::vector<size_t> settle();

  // The first iteration is to be repeated: an error ended it.
  void forget();

  // Variables that never fire, ascending. REQUIRES: !is_learning().
  const std::vector<size_t>& silent() const { return silent_; }

  // True if a variable is known never to fire.
  bool is_silent(size_t variable) const {
    return !learning_ && expected_[variable] == 0;
  }

 private:
  bool learning_ = true;
  bool peers_settled_ = false;
  std::vector<uint32_t> counts_;      // by variable, in this iteration
  std::vector<uint32_t> expected_;    // by variable
  std::vector<uint64_t> last_fired_;  // by variable: when, while learning
  uint64_t num_fired_ = 0;
  std::vector<size_t> silent_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_FIRING_COUNTS_H_
