// Which parameters are reduced together, and in which order.
//
// A BucketPlan is a value: it holds parameter indices and nothing else. It owns
// no tensor, does no communication and knows nothing of autograd, so every rule
// about buckets is tested in microseconds. How a plan is chosen is the business
// of the planners (plan_by_size.h).
//
// Example:
//
//   absl::StatusOr<BucketPlan> plan = BucketPlan::create({{2, 1}, {0}}, 3);
//   plan->locate(1);  // {.bucket = 0, .slot = 1}
//
// Thread safety: immutable after create(); any thread may read.

#ifndef BRIGADE_PLANNING_BUCKET_PLAN_H_
#define BRIGADE_PLANNING_BUCKET_PLAN_H_

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "brigade/planning/variable_locator.h"

namespace brigade {

class BucketPlan {
 public:
  // `buckets[b]` lists the parameters of bucket b in slot order; buckets are
  // launched in index order.
  //
  // Errors:
  //   InvalidArgument  `num_parameters` is 0, a bucket is empty, or a parameter
  //                    is missing, listed twice or >= `num_parameters`.
  static absl::StatusOr<BucketPlan> create(
      std::vector<std::vector<size_t>> buckets, size_t num_parameters);

  const std::vector<std::vector<size_t>>& buckets() const& { return buckets_; }
  std::vector<std::vector<size_t>> buckets() && { return std::move(buckets_); }
  size_t num_buckets() const { return buckets_.size(); }
  size_t num_parameters() const { return locators_.size(); }

  // REQUIRES: parameter < num_parameters().
  VariableLocator locate(size_t parameter) const {
    return locators_[parameter];
  }

  friend bool operator==(const BucketPlan&, const BucketPlan&) = default;

 private:
  BucketPlan(std::vector<std::vector<size_t>> buckets,
             std::vector<VariableLocator> locators);

  std::vector<std::vector<size_t>> buckets_;
  std::vector<VariableLocator> locators_;
};

}  // namespace brigade

#endif  // BRIGADE_PLANNING_BUCKET_PLAN_H_
