// Properties of the autograd graph that a reducer learns in its first
// iterations: the order in which gradients become ready, and in a static graph
// the number of runs of each gradient hook.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_LEARNED_GRAPH_H_
#define BRIGADE_REDUCER_LEARNED_GRAPH_H_

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

// The order in which gradients become ready: observed once, taken from rank 0,
// and adopted by a new plan.
class ReadyOrder {
 public:
  // Observes the last of the first `iterations`; 0: none.
  explicit ReadyOrder(int64_t iterations)
      : iterations_left_(iterations),
        stage_(iterations > 0 ? Stage::kObserving : Stage::kFrozen) {}

  // Starts an iteration: drops the notes of an aborted one.
  void restart() {
    if (is_observing()) order_.clear();
  }

  // The parameter's gradient is ready. No-op once an order is observed.
  void note(size_t parameter) {
    if (is_observing()) order_.push_back(parameter);
  }

  // Ends an iteration that all ranks have ended well.
  void observe() {
    if (is_observing() && --iterations_left_ == 0) stage_ = Stage::kObserved;
  }

  // Returns true until an order is observed.
  bool is_observing() const { return stage_ == Stage::kObserving; }

  // Returns true from the observation until freeze().
  bool is_pending() const {
    return stage_ == Stage::kObserved || stage_ == Stage::kAgreed;
  }

  // Broadcasts rank 0's order, once. Collective. REQUIRES: is_pending(). Throws
  // the broadcast's errors; a later call tries again.
  void agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::vector<size_t>& order() const { return order_; }

  // Drops the order, and observes no more.
  void freeze() {
    order_.clear();
    stage_ = Stage::kFrozen;
  }

 private:
  enum class Stage { kObserving, kObserved, kAgreed, kFrozen };

  int64_t iterations_left_;
  Stage stage_;
  std::vector<size_t> order_;
};

// Number of runs of each gradient hook in an iteration of a static graph.
//
// A parameter that reentrant checkpoints or shared weights use several times
// gets its gradient in several parts, and its hook runs for each. The first
// iteration counts the runs. Later a gradient is ready at its last run.
// Variables are identified by number.
class HookCounts {
 public:
  explicit HookCounts(size_t num_variables);

  // Returns true until freeze().
  bool is_learning() const { return stage_ <= Stage::kLearningAlone; }

  // Returns true if all ranks learn in this iteration.
  bool are_all_learning() const { return stage_ == Stage::kLearning; }

  // Starts an iteration: drops the counts of an unfinished one.
  void restart();

  // Counts a run of the variable's hook. Returns true for its last run in the
  // iteration; false while learning. REQUIRES: that run has not been counted.
  bool count_run(size_t variable);

  // Keeps the counts at the end of the first backward. Returns the variables
  // whose hooks ran, in the order of their last runs. REQUIRES: is_learning().
  std::vector<size_t> freeze();

  // The iteration has ended well on all ranks. A rank without counts took part
  // as a shadow, and learns alone in its first iteration of its own.
  void confirm();

  // The iteration was aborted on all ranks: counts again in the next one.
  void abort();

  // Returns the variables whose hooks never run, ascending. REQUIRES:
  // !is_learning().
  const std::vector<size_t>& silent() const { return silent_; }

  // Returns true if the variable's hook is known never to run.
  bool is_silent(size_t variable) const {
    return !is_learning() && expected_[variable] == 0;
  }

 private:
  enum class Stage {
    kLearning,       // with all ranks
    kLearningAlone,  // the other ranks have counted already
    kCounted,        // in this iteration, which may still be aborted
    kKnown,
  };

  Stage stage_ = Stage::kLearning;
  std::vector<uint32_t> counts_;    // by variable, in this iteration
  std::vector<uint32_t> expected_;  // by variable
  std::vector<uint64_t> last_run_;  // by variable: a run's index; if learning
  uint64_t num_runs_ = 0;
  std::vector<size_t> silent_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_LEARNED_GRAPH_H_
