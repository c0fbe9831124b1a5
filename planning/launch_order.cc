#include "brigade/planning/launch_order.h"

namespace brigade {

LaunchOrder::LaunchOrder(const BucketPlan& plan, size_t num_replicas)
    : plan_(&plan), ready_(num_replicas * plan.num_parameters(), false) {
  pending_.reserve(plan.num_buckets());
  for (const std::vector<size_t>& bucket : plan.buckets()) {
    pending_.push_back(num_replicas * bucket.size());
  }
}

bool LaunchOrder::mark_ready(VariableIndex variable) {
  ready_[place(variable)] = true;
  return --pending_[plan_->locate(variable.parameter).bucket] == 0;
}

std::optional<size_t> LaunchOrder::take_next() {
  if (all_launched() || pending_[next_bucket_] > 0) return std::nullopt;
  return next_bucket_++;
}

std::vector<size_t> LaunchOrder::missing() const {
  std::vector<size_t> parameters;
  const size_t num_parameters = plan_->num_parameters();
  for (size_t i = 0; i < num_parameters; ++i) {
    bool everywhere = true;
    for (size_t p = i; p < ready_.size(); p += num_parameters) {
      everywhere = everywhere && ready_[p];
    }
    if (!everywhere) parameters.push_back(i);
  }
  return parameters;
}

}  // namespace brigade
