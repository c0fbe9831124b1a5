#include "brigade/planning/launch_order.h"

namespace brigade {

LaunchOrder::LaunchOrder(const BucketPlan& plan)
    : plan_(&plan), ready_(plan.num_parameters(), false) {
  pending_.reserve(plan.num_buckets());
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    pending_.push_back(bucket.size());
  }
  ready_order_.reserve(plan.num_parameters());
}

bool LaunchOrder::mark_ready(size_t parameter) {
  ready_[parameter] = true;
  ready_order_.push_back(parameter);
  return --pending_[plan_->locate(parameter).bucket] == 0;
}

std::optional<size_t> LaunchOrder::take_next() {
  if (all_launched() || pending_[next_bucket_] > 0) return std::nullopt;
  return next_bucket_++;
}

std::vector<size_t> LaunchOrder::missing() const {
  std::vector<size_t> parameters;
  for (size_t i = 0; i < ready_.size(); ++i) {
    if (!ready_[i]) parameters.push_back(i);
  }
  return parameters;
}

}  // namespace brigade
