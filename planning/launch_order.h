// Which bucket may be launched next, as gradients become ready in any order.
//
// Every rank must launch the same collectives in the same order, although
// gradients become ready in an order of their own on each rank. So a bucket is
// launched when all its gradients are ready *and* all buckets before it have
// been launched. With local replicas, a bucket waits for the gradients of all
// of them. This class keeps that account for one iteration; it launches nothing
// itself.
//
// Example:
//
//   LaunchOrder order(plan);
//   if (order.mark_ready(variable)) pack(bucket_of(variable));
//   while (const auto bucket = order.take_next()) launch(*bucket);
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_PLANNING_LAUNCH_ORDER_H_
#define BRIGADE_PLANNING_LAUNCH_ORDER_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "brigade/planning/bucket_plan.h"
#include "brigade/planning/variable_index.h"

namespace brigade {

class LaunchOrder {
 public:
  // `plan` must outlive this object.
  explicit LaunchOrder(const BucketPlan& plan, size_t num_replicas = 1);

  bool is_ready(VariableIndex variable) const {
    return ready_[place(variable)];
  }

  // Returns true if this gradient was the last that its bucket waited for.
  // REQUIRES: !is_ready(variable).
  bool mark_ready(VariableIndex variable);

  // The next bucket in plan order, if it is full; each bucket is given once.
  std::optional<size_t> take_next();

  bool all_launched() const { return next_bucket_ == pending_.size(); }

  // Parameters that are not ready on some replica, ascending.
  std::vector<size_t> missing() const;

 private:
  size_t place(VariableIndex variable) const {
    return variable.replica * plan_->num_parameters() + variable.parameter;
  }

  const BucketPlan* plan_;
  std::vector<char> ready_;      // by place(); not vector<bool>: hot path
  std::vector<size_t> pending_;  // by bucket: gradients it still waits for
  size_t next_bucket_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_LAUNCH_ORDER_H_
