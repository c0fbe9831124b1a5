// Which bucket may be launched next, as gradients become ready in any order.
//
// Every rank must launch the same collectives in the same order, although
// gradients become ready in an order of their own on each rank. So a bucket is
// launched when all its gradients are ready *and* all buckets before it have
// been launched. This class keeps that account for one iteration; it launches
// nothing itself.
//
// Example:
//
//   LaunchOrder order(plan);
//   if (order.mark_ready(parameter)) pack(plan.locate(parameter).bucket);
//   while (std::optional<size_t> bucket = order.take_next()) launch(*bucket);
//
// Thread safety: none; the owner serialises calls.

#ifndef BRIGADE_PLANNING_LAUNCH_ORDER_H_
#define BRIGADE_PLANNING_LAUNCH_ORDER_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "brigade/planning/bucket_plan.h"

namespace brigade {

class LaunchOrder {
 public:
  // `plan` must outlive this object.
  explicit LaunchOrder(const BucketPlan& plan);

  bool is_ready(size_t parameter) const { return ready_[parameter]; }

  // Returns true if this gradient was the last that its bucket waited for.
  // REQUIRES: !is_ready(parameter).
  bool mark_ready(size_t parameter);

  // The next bucket in plan order, if it is full; each bucket is given once.
  std::optional<size_t> take_next();

  size_t num_launched() const { return next_bucket_; }
  bool all_launched() const { return next_bucket_ == pending_.size(); }

  // Parameters in the order in which they became ready.
  const std::vector<size_t>& ready_order() const { return ready_order_; }

  // Parameters that are not ready, by index.
  std::vector<size_t> missing() const;

 private:
  const BucketPlan* plan_;
  std::vector<char> ready_;      // by parameter; not vector<bool>: hot path
  std::vector<size_t> pending_;  // by bucket: gradients it still waits for
  std::vector<size_t> ready_order_;
  size_t next_bucket_ = 0;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_LAUNCH_ORDER_H_
