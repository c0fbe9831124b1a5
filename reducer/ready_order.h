// The order in which gradients become ready: observed once, agreed on, adopted.
//
// Thread safety: none; the engine's lock covers it.

#ifndef BRIGADE_REDUCER_READY_ORDER_H_
#define BRIGADE_REDUCER_READY_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace brigade {

class ReadyOrder {
 public:
  // Observes the last of the first `iterations`; 0: never anything.
  explicit ReadyOrder(int64_t iterations)
      : iterations_left_(iterations),
        stage_(iterations > 0 ? Stage::kObserving : Stage::kFrozen) {}

  // An iteration begins: forgets the notes of one that was aborted.
  void restart() {
    if (is_observing()) order_.clear();
  }

  // A gradient is ready. Costs nothing once an order has been observed.
  void note(size_t parameter) {
    if (is_observing()) order_.push_back(parameter);
  }

  // All ranks have launched everything of the iteration: takes its order.
  void observe() {
    if (is_observing() && --iterations_left_ == 0) stage_ = Stage::kObserved;
  }

  // True until an order has been observed.
  bool is_observing() const { return stage_ == Stage::kObserving; }

  // True between the observation and freeze().
  bool is_pending() const {
    return stage_ == Stage::kObserved || stage_ == Stage::kAgreed;
  }

  // Takes rank 0's order on every rank. One broadcast, the first time;
  // collective. REQUIRES: is_pending(). Errors: those of the collective; the
  // order is to be agreed on again then.
  void agree(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

  const std::vector<size_t>& order() const { return order_; }

  // The order has been adopted. Nothing is observed any more.
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

}  // namespace brigade

#endif  // BRIGADE_REDUCER_READY_ORDER_H_
