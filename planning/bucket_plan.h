// Assignment of parameters to buckets, in launch order, and a planner that
// closes a bucket at a given size. Uses indices and sizes only, no LibTorch.
//
//   std::vector<ParameterSpec> parameters = {{.size_bytes = 4096},
//                                            {.size_bytes = 8192}};
//   absl::StatusOr<BucketPlan> plan = plan_by_size(
//       parameters, reverse_registration_order(parameters.size()),
//       kDefaultBucketCapsBytes);
//   plan->locate(1);  // {.bucket = 0, .slot = 0}
//
// Thread safety: plans are immutable; functions are pure.

#ifndef BRIGADE_PLANNING_BUCKET_PLAN_H_
#define BRIGADE_PLANNING_BUCKET_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace brigade {

// plan.buckets()[bucket][slot] == parameter index.
struct VariableLocator {
  size_t bucket = 0;
  size_t slot = 0;

  friend bool operator==(const VariableLocator&,
                         const VariableLocator&) = default;
};

class BucketPlan {
 public:
  // `buckets[b]` lists the parameters of bucket b in slot order; buckets are
  // launched in index order.
  //
  // Errors: InvalidArgument if `num_parameters` is 0, a bucket is empty, or a
  // parameter is missing, listed twice or >= `num_parameters`.
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
             std::vector<VariableLocator> locators)
      : buckets_(std::move(buckets)), locators_(std::move(locators)) {}

  std::vector<std::vector<size_t>> buckets_;
  std::vector<VariableLocator> locators_;
};

// A plan as text, for example in a checkpoint's metadata: "[[2,1],[0]]", which
// is JSON. ReducerOptions::bucket_plan takes the result of parse_buckets().
//
//   save_checkpoint(path, {*net, group}, optimizer,
//                   {{"buckets", to_text(model.reducer().plan())}});
//
// Errors: InvalidArgument for another text.
std::string to_text(const BucketPlan& plan);
absl::StatusOr<std::vector<std::vector<size_t>>> parse_buckets(
    absl::string_view text);

// A parameter of one local replica. A process may hold several replicas of a
// module, one per device.
struct VariableIndex {
  size_t replica = 0;
  size_t parameter = 0;

  friend bool operator==(const VariableIndex&, const VariableIndex&) = default;
};

struct ParameterSpec {
  int64_t size_bytes = 0;  // numel * element size; may be 0
  int kind = 0;            // equal iff dtype and device are equal
  bool sparse = false;     // a sparse gradient has a bucket to itself
};

int64_t bytes_of(std::span<const size_t> bucket,
                 std::span<const ParameterSpec> parameters);

// Errors: InvalidArgument if a bucket mixes kinds, or holds a sparse parameter
// and another parameter. REQUIRES: one spec per parameter of the plan.
absl::Status check_bucket_kinds(const BucketPlan& plan,
                                std::span<const ParameterSpec> parameters);

// A small first bucket starts communication early in backward; large later ones
// pay latency rarely.
inline constexpr std::array<int64_t, 2> kDefaultBucketCapsBytes = {
    int64_t{1} << 20, int64_t{25} << 20};

// Errors: InvalidArgument if there is no cap, or one is not positive.
absl::Status check_bucket_caps(std::span<const int64_t> caps_bytes);

// Returns n-1, ..., 1, 0: backward visits the last layer first.
std::vector<size_t> reverse_registration_order(size_t num_parameters);

// Fills buckets with `parameters` in `order`, in which their gradients become
// ready. A bucket holds one kind, and closes when its size reaches its cap:
// caps_bytes[k] for the k-th bucket of a kind, the last cap for later ones.
// Buckets are numbered in the order in which they close.
//
// Errors: InvalidArgument if `parameters` is empty, caps fail
// check_bucket_caps(), or `order` does not list each parameter once.
//
// Source: Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3. Differs:
// buckets of several kinds are numbered by their last member instead of their
// first, so that a bucket which fills late does not delay a full one.
absl::StatusOr<BucketPlan> plan_by_size(
    std::span<const ParameterSpec> parameters, std::span<const size_t> order,
    std::span<const int64_t> caps_bytes);

}  // namespace brigade

#endif  // BRIGADE_PLANNING_BUCKET_PLAN_H_
