// Fills buckets up to a size, in the order in which gradients become ready.
//
// The order is either known (observed in an earlier iteration) or guessed as
// the reverse of registration, since backward visits the last layer first. The
// planner sees sizes only; it has no tensors.
//
// Example:
//
//   std::vector<ParameterSpec> parameters = {{.size_bytes = 4096},
//                                            {.size_bytes = 8192}};
//   absl::StatusOr<BucketPlan> plan = plan_by_size(
//       parameters, reverse_registration_order(parameters.size()),
//       kDefaultBucketCapsBytes);
//
// Thread safety: pure functions.

#ifndef BRIGADE_PLANNING_PLAN_BY_SIZE_H_
#define BRIGADE_PLANNING_PLAN_BY_SIZE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "brigade/planning/bucket_plan.h"
#include "brigade/planning/parameter_spec.h"

namespace brigade {

// A small first bucket, so that communication begins early in backward; large
// ones after it, so that latency is paid rarely.
inline constexpr std::array<int64_t, 2> kDefaultBucketCapsBytes = {
    int64_t{1} << 20, int64_t{25} << 20};

// n-1, ..., 1, 0.
std::vector<size_t> reverse_registration_order(size_t num_parameters);

// Walks `parameters` in `order`. A bucket holds one kind and closes as soon as
// its size reaches its cap, so it may exceed the cap by less than one
// parameter. The k-th bucket of a kind to close takes caps_bytes[k], the ones
// after the list's end its last entry. Buckets are numbered in the order in
// which they become full when gradients become ready in `order`.
//
// Errors:
//   InvalidArgument  `parameters` or `caps_bytes` is empty, a size is < 0, a
//                    cap is <= 0, or `order` is not a permutation of the
//                    parameter indices.
//
// Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3, for
// reverse order and caps. Differs: buckets of several kinds are numbered by
// their last member rather than their first, so that a bucket which fills late
// does not hold back one that is full.
absl::StatusOr<BucketPlan> plan_by_size(
    std::span<const ParameterSpec> parameters, std::span<const size_t> order,
    std::span<const int64_t> caps_bytes);

// OK if there are caps and all are positive. Errors: InvalidArgument.
absl::Status check_bucket_caps(std::span<const int64_t> caps_bytes);

}  // namespace brigade

#endif  // BRIGADE_PLANNING_PLAN_BY_SIZE_H_
