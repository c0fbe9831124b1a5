// The order in which gradients become ready, observed once and agreed on.
//
// Thread safety: none; the reducer's lock covers it.

#ifndef BRIGADE_REDUCER_READY_ORDER_H_
#define BRIGADE_REDUCER_READY_ORDER_H_

#include <cstddef>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace brigade {

class ReadyOrder {
 public:
  // Not wanted: never observes anything.
  explicit ReadyOrder(bool wanted) : wanted_(wanted) {}

  // Takes the order of a whole iteration; later ones are ignored.
  void observe(const std::vector<size_t>& order) {
    if (wanted_ && observed_.empty()) observed_ = order;
  }

  // True between the observation and the agreement.
  bool is_pending() const { return wanted_ && !observed_.empty(); }

  // Rank 0's order, on every rank. One broadcast; collective. Afterwards
  // nothing is observed any more. Errors: what the collective throws; then the
  // order stays pending.
  std::vector<size_t> agree(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group);

 private:
  bool wanted_;
  std::vector<size_t> observed_;
};

}  // namespace brigade

#endif  // BRIGADE_REDUCER_READY_ORDER_H_
