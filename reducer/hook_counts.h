// Number of runs of each gradient hook in an iteration of a static graph.
//
// A parameter that a reentrant checkpoint or shared weights reach several times
// gets its gradient in several parts. The first iteration counts them; later a
// gradient is ready with its last part. Variables go by their number.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_HOOK_COUNTS_H_
#define BRIGADE_REDUCER_HOOK_COUNTS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace brigade {

class HookCounts {
 public:
  explicit HookCounts(size_t num_variables);

  // True until freeze(): nothing is known of the graph.
  bool is_learning() const { return stage_ <= Stage::kLearningAlone; }

  // True if all ranks learn in this iteration.
  bool are_all_learning() const { return stage_ == Stage::kLearning; }

  // An iteration begins: forgets the counts of an unfinished one.
  void restart();

  // Counts a run of its hook. True if it was the last of this iteration; false
  // while learning. REQUIRES: it has not been the last before.
  bool count_run(size_t variable);

  // The first backward is over: its counts hold, unless it is aborted. Returns
  // the variables whose hooks ran, in the order of the last runs. REQUIRES:
  // is_learning().
  std::vector<size_t> freeze();

  // The iteration has ended well on all ranks. A rank that has frozen no counts
  // in it shadowed the first, and learns alone in its own first one.
  void confirm();

  // The iteration has ended on no rank: the next one is learnt from instead.
  void abort();

  // Variables whose hooks never run, ascending. REQUIRES: !is_learning().
  const std::vector<size_t>& silent() const { return silent_; }

  // True if a variable's hook is known never to run.
  bool is_silent(size_t variable) const {
    return !is_learning() && expected_[variable] == 0;
  }

 private:
  enum class Stage {
    kLearning,       // with the others
    kLearningAlone,  // the others know already
    kCounted,        // in this iteration, which may still be aborted
    kKnown,
  };

  Stage stage_ = Stage::kLearning;
  std::vector<uint32_t> counts_;    // by variable, in this iteration
  std::vector<uint32_t> expected_;  // by variable
  std::vector<uint64_t> last_run_;  // by variable: when, while learning
  uint64_t num_runs_ = 0;
  std::vector<size_t> silent_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_HOOK_COUNTS_H_
