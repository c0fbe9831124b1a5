// Planners: bucket plans that end a step early, the time that a plan takes, and
// a bound from below for all plans; and the units of a sharded model to keep.
//
// Model: gradients become ready at given times. A bucket is launched when all
// of its gradients are ready and all earlier buckets are launched. The link
// runs collectives in the order of launch, CollectiveCost::concurrency() at
// once. A step ends when backward and all collectives have ended.
//
//   const Backward backward = {parameters, order, ready_s};
//   const BucketPlan plan = *plan_for_cost(backward, cost);
//   predict(plan, backward, cost)->exposed_s();
//
// Times are seconds from the begin of backward.
//
// Thread safety: functions are pure.

#ifndef BRIGADE_PLANNING_PLANNERS_H_
#define BRIGADE_PLANNING_PLANNERS_H_

#include <cstddef>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/planning/collective_cost.h"

namespace brigade {

// Backward and collectives slow each other where they share cores.
struct Contention {
  // Backward runs at 1 - this of its speed while a collective runs; in [0, 1).
  double backward_slowdown = 0;

  // A collective takes this times as long while backward runs; >= 1.
  double collective_stretch = 1;

  friend bool operator==(const Contention&, const Contention&) = default;
};

struct Backward {
  std::vector<ParameterSpec> parameters = {};
  std::vector<size_t> order = {};  // parameters, in order of readiness
  // Without communication; by position in `order`; not decreasing.
  std::vector<double> ready_s = {};
  double end_s = 0;  // not before the last gradient
  Contention contention = {};
};

// Errors: InvalidArgument if there is no parameter, `order` doesn't list each
// one once, a size is negative, times are negative, not finite or decrease, or
// the contention is out of range.
absl::Status check_backward(const Backward& backward);

struct StepPrediction {
  struct Collective {
    double launched_s = 0;
    double complete_s = 0;
  };
  double backward_s = 0;  // slowed by collectives
  std::vector<Collective> buckets = {};

  double end_s() const;
  double exposed_s() const { return end_s() - backward_s; }
};

// Errors: those of check_backward(); InvalidArgument if the plan has other
// parameters.
absl::StatusOr<StepPrediction> predict(const BucketPlan& plan,
                                       const Backward& backward,
                                       const CollectiveCost& cost);

// No plan ends a step earlier. Equal to the end of plan_for_cost() if that one
// is exact and the cost is linear. REQUIRES: check_backward().
double earliest_end_s(const Backward& backward, const CollectiveCost& cost);

// Returns the plan that ends the step first, among those whose buckets are
// contiguous in `order`, if all parameters have one kind, none is sparse,
// collectives run one at a time, and there is no contention. Otherwise the best
// of several plans after a local search (bytes of different kinds and sparse
// parameters share no bucket), never worse than plan_by_size() with the default
// caps or one cap of 0.25, 1, 4, 16, 64, 256 or 1,024 MiB.
//
// Takes O(n * pieces of the cost). f(j), the earliest end of the first j
// gradients' collectives, is the minimum over i of
// max(f(i), r(j)) + cost(S(j) - S(i)); see the proof in planners.cc.
//
// With `slack`, a plan with fewer buckets may end later by that share of the
// time: the model lacks the host's time per bucket.
//
// Errors: those of check_backward(); InvalidArgument if slack < 0.
absl::StatusOr<BucketPlan> plan_for_cost(const Backward& backward,
                                         const CollectiveCost& cost,
                                         double slack = 0);

// The slack for measured models, which are no more exact.
inline constexpr double kPlanSlack = 0.003;

// The greedy merge of MG-WFBP (Shi et al., INFOCOM 2019), for comparison: a
// gradient joins the bucket before it if that one would still be in transfer,
// or wait for less than the latency. Differs: a new kind begins a new bucket.
// Errors: those of check_backward().
absl::StatusOr<BucketPlan> plan_by_mg_wfbp(const Backward& backward,
                                           const CollectiveCost& cost);

// One bucket per parameter, and one per kind. Errors: those of
// check_backward().
absl::StatusOr<BucketPlan> plan_each(const Backward& backward);
absl::StatusOr<BucketPlan> plan_one(const Backward& backward);

// Returns the units to keep unsharded from forward to backward within `budget`,
// by all-gather time per byte kept, later units first if equal. The saved
// all-gather time is the greatest possible if units with parameters have equal
// bytes; otherwise less than one unit's share below it.
std::vector<char> units_to_keep(std::span<const double> unit_bytes,
                                std::span<const double> gather_s,
                                double budget);

}  // namespace brigade

#endif  // BRIGADE_PLANNING_PLANNERS_H_
